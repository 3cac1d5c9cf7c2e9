"""Pure: from recorded turns to trees and training samples."""
