"""The owner's end: the server on its private socket, and what it makes of a sibling's request."""
