"""User errors and file helpers: retries, JSON, links, folders, manifests, redaction."""

from sparse_dataflow.files import output

output.print_information()
