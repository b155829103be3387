"""The stop protocol as pure state machines; START HERE: `table`. ../README.md says it in words.

`coordinator` is the daemon's half: `recognise` says what an event means, `order` what has come of the order under way. `participant` is the rank's half.
`rescue` is the daemon's half once a rank has failed. `events`: what the daemon's are told, and tell their shell to do.
"""
