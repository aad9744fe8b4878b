//! Path of the control socket.

use rustix::process::geteuid;
use std::env::var_os;
use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Environment variable with the control socket's path, for a process that serves and for its
/// clients.
pub const VARIABLE: &str = "VNVME_CONTROL";
/// Word that stands in place of the control socket's path and disables the socket.
const NONE: &str = "none";
/// File name of the control socket in its directory.
pub(super) const NAME: &str = "control.sock";
/// File name of the socket that only answers questions (read-only access).
pub(super) const QUESTIONS: &str = "control-ro.sock";
/// Directory of the control socket if the process runs as root.
const DIRECTORY: &str = "/run/vnvme";

/// Path of a process's control socket, and how it was determined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlPlace {
    /// Path of the control socket; `None` if the process has no control socket.
    pub path: Option<PathBuf>,
    /// The path is the default: the process serves without a control socket where it cannot be
    /// made.
    pub is_default: bool,
}

/// Environment variables and user that determine the path of the control socket.
pub(super) struct Environment {
    control: Option<OsString>,
    /// Value of RUNTIME_DIRECTORY, which systemd sets for a service (systemd.exec(5)).
    runtime_directory: Option<OsString>,
    xdg_runtime_dir: Option<OsString>,
    is_root: bool,
}

impl Environment {
    pub(super) fn of_process() -> Self {
        Self {
            control: var_os(VARIABLE),
            runtime_directory: var_os("RUNTIME_DIRECTORY"),
            xdg_runtime_dir: var_os("XDG_RUNTIME_DIR"),
            is_root: geteuid().is_root(),
        }
    }

    /// Returns the directory of the control socket of an ordinary user, below XDG_RUNTIME_DIR.
    fn of_user(&self) -> Option<PathBuf> {
        let directory = Path::new(self.xdg_runtime_dir.as_ref()?);
        directory.is_absolute().then(|| directory.join("vnvme"))
    }

    /// Returns the directories in which processes have their control sockets, and in which each
    /// instance of the unit `vnvme@.service` has a directory. The first text begins the names of
    /// their instances.
    pub(super) fn run_directories(&self) -> Vec<(&'static str, PathBuf)> {
        let user = self.of_user().filter(|_| !self.is_root);
        let user = user.map(|directory| ("user", directory));
        let system = ("vnvme", PathBuf::from(DIRECTORY));
        user.into_iter().chain([system]).collect()
    }

    /// Returns the directory in which a serving process creates its control socket.
    fn of_server(&self) -> Option<PathBuf> {
        let given = self.runtime_directory.as_ref().and_then(|list| {
            let first = list.to_str()?.split(':').next()?;
            Path::new(first).is_absolute().then(|| first.into())
        });
        match (given, self.is_root) {
            (Some(directory), _) => Some(directory),
            (None, true) => Some(DIRECTORY.into()),
            (None, false) => self.of_user(),
        }
    }

    fn place(&self, said: Option<&Path>) -> ControlPlace {
        let variable = self.control.as_deref().filter(|text| !text.is_empty());
        match said.map(Path::as_os_str).or(variable) {
            Some(text) if text == NONE => ControlPlace::default(),
            Some(path) => ControlPlace {
                path: Some(path.into()),
                is_default: false,
            },
            None => ControlPlace {
                path: self.of_server().map(|directory| directory.join(NAME)),
                is_default: true,
            },
        }
    }

    fn client_paths(&self, said: Option<&Path>) -> Vec<PathBuf> {
        let variable = self.control.as_deref().filter(|text| !text.is_empty());
        let variable = variable.filter(|text| *text != OsStr::new(NONE));
        if let Some(path) = said.map(Path::as_os_str).or(variable) {
            return vec![path.into()];
        }
        let user = self.of_user().filter(|_| !self.is_root);
        let mut paths: Vec<PathBuf> = user.into_iter().map(|of| of.join(NAME)).collect();
        paths.push(Path::new(DIRECTORY).join(NAME));
        if !self.is_root {
            paths.push(Path::new(DIRECTORY).join(QUESTIONS));
        }
        paths
    }
}

impl ControlPlace {
    /// Selects the path: from the option, else from the environment, else the default. Makes the
    /// default directory.
    pub fn new(said: Option<&Path>) -> Self {
        let environment = Environment::of_process();
        let place = environment.place(said);
        if let (true, Some(directory)) = (
            place.is_default,
            place.path.as_ref().and_then(|p| p.parent()),
        ) {
            let mode = if environment.is_root { 0o755 } else { 0o700 };
            // An error shows when the socket is made.
            let _ = DirBuilder::new().mode(mode).create(directory);
        }
        place
    }
}

/// Returns the paths at which a client looks for a process: the first that accepts a connection
/// counts.
pub fn client_paths(said: Option<&Path>) -> Vec<PathBuf> {
    Environment::of_process().client_paths(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(control: &str, xdg: &str, is_root: bool) -> Environment {
        let some = |text: &str| (!text.is_empty()).then(|| text.into());
        Environment {
            control: some(control),
            runtime_directory: None,
            xdg_runtime_dir: some(xdg),
            is_root,
        }
    }

    fn shown(place: &ControlPlace) -> (&str, bool) {
        let path = place
            .path
            .as_deref()
            .map_or("", |path| path.to_str().unwrap());
        (path, place.is_default)
    }

    #[test]
    fn server_uses_configured_or_default_control_socket() {
        let root = environment("", "/run/user/0", true);
        assert_eq!(shown(&root.place(None)), ("/run/vnvme/control.sock", true));
        assert_eq!(shown(&root.place(Some(Path::new("/a")))), ("/a", false));
        assert_eq!(shown(&root.place(Some(Path::new("none")))), ("", false));
        let user = environment("", "/run/user/7", false);
        assert_eq!(
            shown(&user.place(None)),
            ("/run/user/7/vnvme/control.sock", true)
        );
        assert_eq!(shown(&environment("", "", false).place(None)), ("", true));
        assert_eq!(
            shown(&environment("", "here", false).place(None)),
            ("", true)
        );
        let said = environment("/b", "/run/user/7", false);
        assert_eq!(shown(&said.place(None)), ("/b", false));
        assert_eq!(shown(&said.place(Some(Path::new("/a")))), ("/a", false));
        assert_eq!(
            shown(&environment("none", "/x", true).place(None)),
            ("", false)
        );
        let unit = Environment {
            runtime_directory: Some("/run/vnvme/vm0:/run/other".into()),
            ..environment("", "/run/user/7", false)
        };
        assert_eq!(
            shown(&unit.place(None)),
            ("/run/vnvme/vm0/control.sock", true)
        );
    }

    #[test]
    fn client_looks_for_control_socket_like_server() {
        let paths = |environment: &Environment, said: Option<&str>| {
            let paths = environment.client_paths(said.map(Path::new));
            let paths = paths.iter().map(|path| path.to_str().unwrap());
            paths.collect::<Vec<_>>().join(" ")
        };
        let root = environment("", "/run/user/0", true);
        assert_eq!(paths(&root, None), "/run/vnvme/control.sock");
        let user = environment("", "/run/user/7", false);
        let all = "/run/user/7/vnvme/control.sock /run/vnvme/control.sock \
                   /run/vnvme/control-ro.sock";
        assert_eq!(paths(&user, None), all);
        assert_eq!(paths(&user, Some("/a")), "/a");
        assert_eq!(paths(&environment("/b", "", true), None), "/b");
        assert_eq!(
            paths(&environment("none", "", true), None),
            "/run/vnvme/control.sock"
        );
    }
}
