//! The socket for questions: a group's members may connect to it.

use crate::keep::{KeeperSession, ProcessSocket};
use anyhow::{Context, Result};
use config::access::{Principal, SocketAccess};
use std::path::{Path, PathBuf};
use vfio_user::Listener;

/// Returns the path of the read-only socket beside the control socket: `control-ro.sock` beside
/// `control.sock`.
pub fn path_beside(control: &Path) -> PathBuf {
    let mut name = control.file_stem().unwrap_or_default().to_owned();
    name.push("-ro");
    if let Some(extension) = control.extension() {
        name.push(".");
        name.push(extension);
    }
    control.with_file_name(name)
}

/// Listens beside the control socket, for a group: its members may connect, too.
///
/// # Errors
/// There is no such group, the socket cannot be made, or this process may not give it to that
/// group.
pub fn listen(control: &Path, group: &Principal, keeper: &KeeperSession) -> Result<Listener> {
    let access = SocketAccess {
        group: Some(group.clone()),
        ..SocketAccess::default()
    };
    let path = path_beside(control);
    let inherited = keeper.inherited.listener(&path, &SocketAccess::default())?;
    if let Some(listener) = inherited.or_else(|| ProcessSocket::Questions.left(keeper, &path)) {
        return Ok(listener);
    }
    // The error of the group names the option.
    group.group().context("control-group")?;
    let access = access.resolve()?;
    let listener = Listener::bind_for(path, &access)?;
    ProcessSocket::Questions.keep_listener(keeper, &listener);
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_socket_is_beside_control_socket() {
        let beside = |path: &str| path_beside(Path::new(path)).display().to_string();
        assert_eq!(
            beside("/run/vnvme/control.sock"),
            "/run/vnvme/control-ro.sock"
        );
        assert_eq!(beside("/tmp/ctl"), "/tmp/ctl-ro");
        assert_eq!(beside("ctl"), "ctl-ro");
    }
}
