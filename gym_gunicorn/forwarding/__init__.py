"""From one worker to another, both ends: the contract, the ways (links, HTTP), and the owner's private server."""
