"""What a request must be before it is written into the journal. Pure functions: no store, no clock."""
