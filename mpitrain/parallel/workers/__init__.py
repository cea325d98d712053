"""Workers of a federation on the ranks that host them: local training, their changes added up, their states."""
