"""Write an advice on a deployment: as text, as a page by itself, as JSON, and files for servers."""
