"""The figures of a page, as data: lines over steps, matrices, and what ranks do over time. The page's script draws them
with Apache ECharts."""
