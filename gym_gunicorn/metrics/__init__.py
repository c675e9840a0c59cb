"""What workers count, and what is shown of it: titles, status, Prometheus, statsd."""
