"""The benchmark behind ``scripts/bench``: what the routing costs beside the other ways to serve.

From bottom to top: ``app`` is what is served; ``setups`` are the ways to serve it, started by
``servers``; ``asking`` and ``callers`` make the load, with the ``exchanges`` that are checked answer
by answer; ``sessions`` spreads sessions and connections over the workers; ``works`` names the kinds of load;
``accounts`` reads what the processes cost; ``rounds`` measures, ``figures`` condenses,
``wanted``, ``report`` and ``plot`` show it; ``growth`` is the second mode, how cost grows.
"""
