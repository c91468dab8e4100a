"""Write the verdicts of the replication as JSON, Markdown and a picture."""
