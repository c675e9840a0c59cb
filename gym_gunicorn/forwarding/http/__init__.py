"""The plain HTTP way to an owner, by aiohttp."""
