"""User errors and file helpers: retries, JSON, links, folders, manifests, redaction."""
