"""The probe's time, its findings and its errors, on the lab and simulated."""
