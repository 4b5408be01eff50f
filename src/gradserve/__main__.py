"""python -m gradserve"""

from gradserve.cli import main

main()
