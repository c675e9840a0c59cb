"""Examples that are servers in their own right:
``gunicorn -c python:gym_gunicorn.conf gym_gunicorn.gym.examples.counter:app``.
"""
