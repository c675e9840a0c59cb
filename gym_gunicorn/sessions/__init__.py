"""What a request says of its session: carriers, the stamp, and where an app keeps its sessions."""
