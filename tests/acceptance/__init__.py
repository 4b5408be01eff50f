"""The public tinker-cookbook's own recipe tests, run unchanged against a gradserve server. See README.md here."""
