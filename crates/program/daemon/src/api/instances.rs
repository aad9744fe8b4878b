//! Instances of vnvme on this host: the control sockets in the run directories.

use super::socket_path::{Environment, NAME, QUESTIONS};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Process with a control socket, found by that socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of the systemd unit that would have this control socket, as `vnvme@vm0`; `user` and
    /// `user@vm0` in the directory of an ordinary user.
    pub name: String,
    /// Paths of the control socket, and of the read-only socket beside it if that exists.
    pub sockets: Vec<PathBuf>,
}

/// Instances that were found, and the directories that were searched.
#[derive(Debug, Default)]
pub struct Instances {
    /// Instances with a control socket.
    pub found: Vec<Instance>,
    /// Searched directories.
    pub searched: Vec<PathBuf>,
}

impl Instances {
    /// Finds all instances in the run directories. `said` is another directory to search instead,
    /// or a further control socket.
    pub fn find(said: Option<&Path>) -> Self {
        let said = said.filter(|path| *path != Path::new("none"));
        let mut all = Self::default();
        if let Some(directory) = said.filter(|path| path.is_dir()) {
            all.search("vnvme", directory);
            return all;
        }
        for (prefix, directory) in Environment::of_process().run_directories() {
            all.search(prefix, &directory);
        }
        let is_found = |socket: &Path| {
            let mut sockets = all.found.iter().flat_map(|one| &one.sockets);
            sockets.any(|found| found == socket)
        };
        if let Some(socket) = said.filter(|path| !is_found(path)) {
            all.found.push(Instance {
                name: socket.display().to_string(),
                sockets: vec![socket.to_owned()],
            });
        }
        all
    }

    /// Adds the instance of a run directory, and those of its subdirectories, sorted by name.
    fn search(&mut self, prefix: &str, directory: &Path) {
        self.searched.push(directory.to_owned());
        self.found.extend(instance(prefix.to_owned(), directory));
        let entries = std::fs::read_dir(directory).into_iter().flatten();
        let entries = entries.flatten().map(|entry| entry.path());
        let mut directories: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
        directories.sort();
        for directory in directories {
            let name = directory.file_name().unwrap_or_default().to_string_lossy();
            self.found
                .extend(instance(format!("{prefix}@{name}"), &directory));
        }
    }
}

/// Returns the instance whose control socket is in this directory. A directory that this user may
/// not search counts: a question to the instance fails with that reason.
fn instance(name: String, directory: &Path) -> Option<Instance> {
    let [socket, questions] = [NAME, QUESTIONS].map(|file| directory.join(file));
    let is_missing = |path: &Path| match path.symlink_metadata() {
        Ok(_) => false,
        Err(error) => matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    };
    if is_missing(&socket) {
        return None;
    }
    let mut sockets = vec![socket];
    sockets.extend(Some(questions).filter(|path| path.exists()));
    Some(Instance { name, sockets })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};

    #[test]
    fn instances_are_named_by_their_directories() {
        let run = tempfile::tempdir().unwrap();
        let at = |name: &str| run.path().join(name);
        for folder in ["vm1", "vm0", "pool"] {
            create_dir_all(at(folder)).unwrap();
        }
        for socket in [
            "control.sock",
            "vm0/control.sock",
            "vm0/control-ro.sock",
            "vm1/control.sock",
            "pool/vm2.sock",
            "vm3.sock",
        ] {
            write(at(socket), "").unwrap();
        }
        let all = Instances::find(Some(run.path()));
        let one = |name: &str, sockets: &[&str]| Instance {
            name: name.to_owned(),
            sockets: sockets.iter().map(|socket| at(socket)).collect(),
        };
        assert_eq!(
            all.found,
            [
                one("vnvme", &["control.sock"]),
                one("vnvme@vm0", &["vm0/control.sock", "vm0/control-ro.sock"]),
                one("vnvme@vm1", &["vm1/control.sock"]),
            ]
        );
        assert_eq!(all.searched, [run.path()]);
        // A socket by another name is added to those of the run directories.
        let other = at("pool/vm2.sock");
        let all = Instances::find(Some(&other));
        let last = all.found.last().unwrap();
        assert_eq!(
            (&last.name, &last.sockets),
            (&other.display().to_string(), &vec![other])
        );
    }
}
