//! Conversion of this program's errors to errors of the control API. Errors that the request caused
//! are distinguished from failures of this process or its machine: the status of the answer shows
//! which.

use control::{Error, ErrorKind};
use controller::ConfigError;
use rustix::io::Errno;
use std::io;
use vfio_user::ListenError;
use volume::gpt::GptError;
use volume::{OpenError, VolumeError};

/// Converts an error to an error of the control API.
pub(super) fn failed(error: anyhow::Error) -> Error {
    let kind = error.chain().find_map(|cause| {
        let open = cause.downcast_ref().map(of_open);
        let volume = || cause.downcast_ref().map(of_volume);
        let listen = || cause.downcast_ref().map(of_listen);
        let is_config = || cause.is::<ConfigError>();
        open.or_else(volume)
            .or_else(listen)
            .or_else(|| is_config().then_some(ErrorKind::Invalid))
    });
    Error {
        kind: kind.unwrap_or(ErrorKind::Failed),
        message: format!("{error:#}"),
    }
}

fn of_open(error: &OpenError) -> ErrorKind {
    match error {
        OpenError::Nothing { .. }
        | OpenError::Scheme { .. }
        | OpenError::Size { .. }
        | OpenError::Escape { .. }
        | OpenError::NoValue { .. }
        | OpenError::UnknownOption { .. }
        | OpenError::NoEffect { .. }
        | OpenError::Twice { .. }
        | OpenError::Value { .. }
        | OpenError::TwoPartitions { .. } => ErrorKind::Invalid,
        OpenError::Gpt { error, .. } => match error {
            GptError::Open(error) => of_volume(error),
            GptError::Read(_) => ErrorKind::Failed,
            _ => ErrorKind::Invalid,
        },
        OpenError::Overlap(_) => ErrorKind::Conflict,
        OpenError::Volume(error) => of_volume(error),
        OpenError::Named { why, .. } => of_open(why),
        // Error of a kind of volume with its own error type.
        _ => ErrorKind::Failed,
    }
}

/// Returns the kind of API error that corresponds to a volume's error.
pub(super) fn of_volume(error: &VolumeError) -> ErrorKind {
    match error {
        VolumeError::Locked { .. } | VolumeError::FixedSize => ErrorKind::Conflict,
        VolumeError::NotFound { .. }
        | VolumeError::Permission { .. }
        | VolumeError::IsDirectory { .. }
        | VolumeError::WrongType { .. }
        | VolumeError::ImageFormat { .. }
        | VolumeError::Empty { .. }
        | VolumeError::OddSize { .. }
        | VolumeError::ReadOnlyMedium { .. }
        | VolumeError::LockUnsupported { .. }
        | VolumeError::DirectUnsupported { .. }
        | VolumeError::BlockSize { .. }
        | VolumeError::SliceRange { .. }
        | VolumeError::SliceAlignment { .. }
        | VolumeError::Size { .. } => ErrorKind::Invalid,
        VolumeError::System { error, .. } => of_system(error),
        _ => ErrorKind::Failed,
    }
}

fn of_listen(error: &ListenError) -> ErrorKind {
    match error {
        ListenError::TooLong(_)
        | ListenError::Access(_)
        | ListenError::NoFolder { .. }
        | ListenError::NoPermission { .. } => ErrorKind::Invalid,
        ListenError::InUse(_)
        | ListenError::NotASocket(_)
        | ListenError::Locked(_)
        | ListenError::ForeignLock { .. }
        | ListenError::NotALock(_) => ErrorKind::Conflict,
        ListenError::System { errno, .. } => of_system(&io::Error::from(*errno)),
    }
}

/// Returns the kind of API error for a failed system call. A path that does not exist is the
/// request's mistake.
fn of_system(error: &io::Error) -> ErrorKind {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(
            Errno::NOENT
            | Errno::NOTDIR
            | Errno::NAMETOOLONG
            | Errno::LOOP
            | Errno::ACCESS
            | Errno::PERM
            | Errno::ROFS
            | Errno::INVAL,
        ) => ErrorKind::Invalid,
        _ => ErrorKind::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn error_caused_by_request_is_no_failure() {
        let open = |url: &str| {
            let opened = volume::open_url(url, Default::default());
            let placed = opened.map(drop).context("c.toml, line 7");
            failed(placed.unwrap_err()).kind
        };
        for (url, kind) in [
            ("iscsi://a", ErrorKind::Invalid),
            ("mem://1M?iops=fast", ErrorKind::Invalid),
            ("mem://1M?partition=7", ErrorKind::Invalid),
            ("/none/of/it", ErrorKind::Invalid),
            ("/dev/null/x", ErrorKind::Invalid),
            ("/", ErrorKind::Invalid),
        ] {
            assert_eq!(open(url), kind, "{url}");
        }
        let busy = ListenError::InUse("/run/a".into());
        assert_eq!(failed(busy.into()).kind, ErrorKind::Conflict);
        let other = anyhow::anyhow!("the moon");
        assert_eq!(failed(other).kind, ErrorKind::Failed);
    }
}
