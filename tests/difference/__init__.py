"""A forwarded request is the same request: proven by difference.

Each test sends the same bytes straight to a session's owner and through another worker,
and compares what the caller got and what the owner's handler saw.
"""
