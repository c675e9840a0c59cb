"""What ``gym-gunicorn doctor`` knows: how facts are gathered, and what follows from them.

Facts of the configuration and the app are gathered in processes of their own
(``inspection``), facts of the host in the command's (``host``). ``checks`` and
its neighbours turn facts into findings, and touch nothing.
"""
