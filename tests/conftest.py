"""What every test stands on."""

import signal

# a shell that starts the tests in the background lets Ctrl-C be ignored, and every process below inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)
