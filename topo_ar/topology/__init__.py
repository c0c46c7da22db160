"""What the machine is: devices, links, and where ranks sit."""
