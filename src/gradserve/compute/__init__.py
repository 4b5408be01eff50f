"""Tasks, what runs them, and where their arrays live. torch is imported in ``engine`` only."""
