"""The parts of `peers.py`: servers, what they are asked, what is made of the answers."""
