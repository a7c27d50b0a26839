"""What the user sees of a job: `console`; and what one rank may have of the terminal: `attached_terminal`."""
