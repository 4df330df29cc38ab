"""The stand-in for NVIDIA's `apex`, whose `amp` was removed in 2025 and is still imported by thousands of scripts.

`mpx.launch.apex_import` serves these files under apex's own names. Nothing here casts or scales: each call is handed to
the session that runs already, or to the part of torch that took the place of apex's.
"""
