"""What people see of a verdict: reports, pages, what tokens rest on."""
