"""From recorded turns to trees and training samples: pure functions."""
