"""Pages that are made when the site is built: from docstrings, the command, the schema and the records."""
