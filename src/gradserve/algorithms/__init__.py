"""What to learn and how: tasks, rewards, trainers. Over the public tinker SDK only, so they run on any such service."""
