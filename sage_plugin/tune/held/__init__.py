"""What was found before, taken up again: results of runs, configs that are believed in."""
