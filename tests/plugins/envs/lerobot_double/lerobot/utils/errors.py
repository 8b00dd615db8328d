class DeviceNotConnectedError(ConnectionError):
    def __init__(self, message="This device is not connected. Try calling `connect()` first."):
        self.message = message
        super().__init__(self.message)
