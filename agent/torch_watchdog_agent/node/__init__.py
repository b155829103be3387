"""The node process's half; START HERE: `agent`, whose loop runs `work`.

From the ranks: `rings` (`blocks`), the line of each (`relay`), their processes (`processes`, `stopped`, `loaders`, `outside`), their logs (`logs`), what they
say at their end (`lastwords`). Of the machine: `nvml`, `memory`. To the daemon: `stream`, `unacked`. What lets the ranks' launcher go on: `keepers`. What it is
told and hands back: `config`.
"""
