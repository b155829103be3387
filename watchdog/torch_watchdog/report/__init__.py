"""What is told about a job after or during its life, for people and for other tools."""
