"""Who answers a request: the worker that it reached, its session's owner, or one with more room."""
