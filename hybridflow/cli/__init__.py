"""What a person starts from a shell: commands, settings of a driver, doctor, profile. Read `commands.py` first."""
