"""Run documents as a page to look at (`page`), and their figures as files (`export`)."""
