"""One file for each thing of torch or a framework that is hooked; `install` puts them in place when their module is imported."""
