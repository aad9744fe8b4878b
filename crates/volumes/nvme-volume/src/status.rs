//! Errors of failed commands.

use nvme::Status;
use volume::{IoError, IoErrorKind};

/// Converts a failed command's status to the error of a volume's request; `write`: the command
/// changes the volume.
pub fn status_error(status: Status, write: bool) -> IoError {
    let kind = match status.without_flags() {
        Status::LBA_OUT_OF_RANGE => IoErrorKind::OutOfRange,
        Status::CAPACITY_EXCEEDED => IoErrorKind::NoSpace,
        Status::NAMESPACE_WRITE_PROTECTED => IoErrorKind::ReadOnly,
        Status::DATA_TRANSFER_ERROR => IoErrorKind::Memory,
        Status::ABORT_REQUESTED | Status::ABORTED_SQ_DELETION => IoErrorKind::Aborted,
        Status::INVALID_NAMESPACE_OR_FORMAT => IoErrorKind::Gone,
        Status::INVALID_FIELD => IoErrorKind::Invalid,
        Status::INVALID_OPCODE => IoErrorKind::Unsupported,
        _ if write => IoErrorKind::MediaWrite,
        _ => IoErrorKind::MediaRead,
    };
    kind.into()
}
