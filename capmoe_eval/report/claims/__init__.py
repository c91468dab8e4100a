"""Write the claims ledger as Markdown, HTML and JSON."""
