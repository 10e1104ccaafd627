"""The control store of a launch: its server, who leads, signs of life, orders and messages, invitations."""
