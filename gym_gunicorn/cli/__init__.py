"""The command ``gym-gunicorn``: looks at servers, and at configurations, from outside."""
