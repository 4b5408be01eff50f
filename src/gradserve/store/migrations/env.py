"""Run the migrations on the connection that ``store.schema.migrate`` hands over, inside its transaction."""

from alembic import context

from gradserve.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
