"""What runs on the user's machine: connecting to a server, or starting one for this process. No torch."""
