//! Access checks for files and servers that are opened while the process runs. They must lie below
//! the folders that the configuration lists. The sandbox enforces this in any case. The checks here
//! produce readable errors before anything is tried.

use crate::confine::inherited::Inherited;
use crate::confine::path_check::PathAnswers;
use crate::confine::socket_maker::Grants;
use crate::serve::options::ServeOptions;
use config::access::SocketAccess;
use config::choices::SandboxMode;
use config::disk::{DiskSpec, path_option, paths_of_volume};
use config::volumes::{self, Kind};
use control::Error;
use luks::KeySource;
use remote::{Address, HostPort};
use std::net::IpAddr;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use volume::Extras;

/// Word in the `allow` list that permits block devices of the host (ublk).
pub const UBLK: &str = "ublk";

/// The `allow` option, resolved for checks.
pub struct Allow {
    /// Permitted folders and files, without links and dots; `None` if everything is permitted.
    places: Option<Vec<PathBuf>>,
    servers: Vec<Address>,
    ublk: bool,
    /// Base of relative paths. Inside the sandbox the kernel does not return the current directory.
    here: PathBuf,
    /// Default access to sockets, for disks that do not set it themselves.
    access: SocketAccess,
    /// Access to sockets that can be set in the sandbox.
    grants: Grants,
    inherited: Arc<Inherited>,
    answers: Arc<PathAnswers>,
}

/// Returns the folders and files of the `allow` list.
pub fn places(options: &ServeOptions) -> Vec<PathBuf> {
    let is_place = |path: &&PathBuf| path.as_os_str() != UBLK && of_entry(path).is_empty();
    let listed = options.allow.iter().filter(is_place);
    let mut places: Vec<PathBuf> = listed.cloned().collect();
    if allows_ublk(options) {
        places.push("/dev".into());
    }
    places
}

/// The servers of the list, by the URL of any of their volumes.
pub fn servers(options: &ServeOptions) -> Vec<Address> {
    let listed = options.allow.iter();
    listed.flat_map(|entry| of_entry(entry)).collect()
}

fn of_entry(entry: &Path) -> Vec<Address> {
    entry.to_str().map(volumes::servers).unwrap_or_default()
}

/// Returns whether the option `allow` names `ublk`: inside the sandbox, block devices of the host
/// may be added at run time only then.
pub fn allows_ublk(options: &ServeOptions) -> bool {
    options.allow.iter().any(|path| path.as_os_str() == UBLK)
}

impl Allow {
    /// Makes the checks of a process with these options. `access` is the default access of its
    /// sockets.
    pub fn new(
        options: &ServeOptions,
        access: &SocketAccess,
        grants: Grants,
        inherited: &Arc<Inherited>,
    ) -> Self {
        let real = |path: PathBuf| options.answers.canonicalize(&path).unwrap_or(path);
        let places = places(options).into_iter().map(real).collect();
        Self {
            places: (options.sandbox == SandboxMode::On).then_some(places),
            servers: servers(options),
            ublk: allows_ublk(options),
            here: std::env::current_dir().unwrap_or_default(),
            access: access.clone(),
            grants,
            inherited: inherited.clone(),
            answers: options.answers.clone(),
        }
    }

    /// Returns whether the process has a sandbox, so that paths are checked.
    pub fn is_confined(&self) -> bool {
        self.places.is_some()
    }

    /// Refuses a disk that could not be opened.
    ///
    /// # Errors
    /// The disk's volume or socket is not allowed; the error names the option that allows it.
    pub fn check(&self, disk: &DiskSpec) -> Result<(), Error> {
        if let Some(socket) = disk.socket() {
            self.check_path(socket)?;
            self.check_access(disk)?;
        }
        if disk.is_device() && self.places.is_some() && !self.ublk {
            return Err(Error::unsupported(format!(
                "{}: block devices of the host can only be added where the sandbox was told so: \
                 write allow = [\"{UBLK}\", ...] into [process], and start the daemon again",
                disk.name()
            )));
        }
        self.check_pool(disk)?;
        disk.volumes()
            .into_iter()
            .try_for_each(|url| self.check_volume(url))
    }

    /// Checks that the folder of a disk's pool, in which files are created, is permitted.
    fn check_pool(&self, disk: &DiskSpec) -> Result<(), Error> {
        let pool = disk.pool();
        pool.map_or(Ok(()), |pool| self.check_path(pool))
    }

    /// Does the check of [`Allow::check`], and accepts volumes and sockets that the known disks
    /// have opened before there was a sandbox.
    ///
    /// # Errors
    /// As [`Allow::check`].
    pub fn check_beside(&self, disk: &DiskSpec, known: &[DiskSpec]) -> Result<(), Error> {
        if known.contains(disk) {
            return Ok(());
        }
        let same = known.iter().find(|known| {
            known.kind() == disk.kind()
                && known.name() == disk.name()
                && known.socket() == disk.socket()
        });
        if same.is_none_or(|same| same.access() != disk.access()) {
            return self.check(disk);
        }
        self.check_pool(disk)?;
        let is_known = |url: &&str| known.iter().any(|known| known.volumes().contains(url));
        let mut unknown = disk.volumes().into_iter().filter(|url| !is_known(url));
        unknown.try_for_each(|url| self.check_volume(url))
    }

    /// In the sandbox no file changes its owner, group or mode: the calls would reach every file of
    /// the user. A process outside makes sockets with the access control of the configuration.
    fn check_access(&self, disk: &DiskSpec) -> Result<(), Error> {
        let Some(own) = disk.access() else {
            return Ok(());
        };
        let access = own.or(&self.access);
        if self.places.is_none() {
            let resolved = access.resolve().map(drop);
            return resolved.map_err(|error| Error::invalid(format!("{error:#}")));
        }
        if access.is_usual() || self.grants.has(&access) {
            return Ok(());
        }
        // The opener of an inherited socket has set its access already.
        if disk
            .socket()
            .is_some_and(|socket| self.inherited.is_there(socket))
        {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "{}: in its sandbox, the daemon makes sockets only with a socket-owner, socket-group and \
             socket-mode that [process] or a disk had in the configuration at its start: write those \
             of this disk into [process], and start the daemon again",
            disk.name()
        )))
    }

    /// Refuses a volume that could not be opened.
    ///
    /// # Errors
    /// As [`Allow::check`].
    pub fn check_volume(&self, url: &str) -> Result<(), Error> {
        let kind = Kind::of(url);
        if matches!(kind, Some(Kind::Device(_) | Kind::Within(_))) {
            return Err(Error::unsupported(format!(
                "{url}: volumes on devices belong into the configuration that the daemon starts \
                 with: they cannot be added while it runs"
            )));
        }
        if let Some(Kind::Remote(kind)) = kind
            && let Some(why) = kind.needs_start()
            && self.places.is_some()
        {
            return Err(Error::unsupported(format!("{url}: {why}")));
        }
        self.check_key(url)?;
        let servers = volumes::servers(url);
        if !servers.is_empty() {
            let mut servers = servers.into_iter();
            return servers.try_for_each(|address| self.check_server(url, address));
        }
        let mut paths = paths_of_volume(url).into_iter();
        paths.try_for_each(|path| self.check_path(&path))?;
        if let Some(journal) = volume::journal_of_url(url) {
            self.check_path(&journal)?;
        }
        // Where the files behind an image are.
        path_option(url, "backing").map_or(Ok(()), |path| self.check_path(path))
    }

    /// Refuses a key or header of an encrypted volume that could not be read.
    fn check_key(&self, url: &str) -> Result<(), Error> {
        // Invalid options are refused when the volume is opened.
        let Ok((_, extras)) = Extras::split(url) else {
            return Ok(());
        };
        let Some(encryption) = extras.encryption() else {
            return Ok(());
        };
        let invalid = |why: String| Error::invalid(format!("luks={}: {why}", encryption.key));
        let source = KeySource::parse(&encryption.key).map_err(|why| invalid(why.to_owned()))?;
        let path = source.path().map_err(|error| invalid(error.to_string()))?;
        self.check_path(&path)?;
        if let Some(header) = &encryption.header {
            return self.check_path(header);
        }
        // Reading a network volume takes a ring, which a process in its sandbox cannot make.
        if volumes::remote(url).is_some() && self.places.is_some() {
            return Err(Error::unsupported(format!(
                "{url}: in the sandbox, the LUKS header in a volume on a server cannot be read: name a \
                 copy of the header by luks-header=PATH (cryptsetup luksHeaderBackup makes one), or \
                 write the disk into the configuration that the daemon starts with"
            )));
        }
        Ok(())
    }

    /// Refuses servers other than those of the list and those of the disks that were there at the
    /// start.
    fn check_server(&self, url: &str, address: Address) -> Result<(), Error> {
        if self.places.is_none() {
            return Ok(());
        }
        if let Address::Tcp { host, .. } = &address
            && host.parse::<IpAddr>().is_err()
        {
            return Err(Error::unsupported(format!(
                "{url}: in the sandbox no host's name is resolved: name the server by its address"
            )));
        }
        if self.servers.contains(&address) {
            return Ok(());
        }
        let (scheme, _) = url.split_once("://").unwrap_or_default();
        let server = match address {
            Address::Tcp { host, port } => format!("{scheme}://{}/", HostPort { host, port }),
            Address::Unix(path) => format!("{scheme}:///?socket={}", path.display()),
        };
        Err(Error::invalid(format!(
            "{url}: the sandbox keeps this process from connecting to its server: write allow = \
             [\"{server}\", ...] into [process], and start the daemon again"
        )))
    }

    /// Returns a path with its links resolved, see [`real`].
    pub(super) fn real(&self, path: &Path) -> PathBuf {
        real(&self.here.join(path), &self.answers)
    }

    pub(super) fn check_path(&self, path: &Path) -> Result<(), Error> {
        let Some(places) = &self.places else {
            return Ok(());
        };
        let real = self.real(path);
        // Where it leads could not be found out: nothing of it is trusted.
        let leads_up = real.components().any(|part| part == Component::ParentDir);
        if !leads_up && places.iter().any(|place| real.starts_with(place)) {
            return Ok(());
        }
        let list: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        let list = if list.is_empty() {
            "which allows nothing".to_owned()
        } else {
            format!(
                "which allows {}; add the folder there, and start the daemon again",
                list.join(", ")
            )
        };
        Err(Error::invalid(format!(
            "{}: the sandbox keeps this process from opening it: it is not below a folder that the \
             option allow of [process] names, {list}",
            path.display()
        )))
    }
}

/// Resolves the links of a path: of the file itself, or of the folder in which it is to be made.
fn real(path: &Path, answers: &PathAnswers) -> PathBuf {
    if answers.is_unanswered(path) {
        return std::path::absolute(path).unwrap_or_else(|_| path.into());
    }
    if let Ok(real) = path.canonicalize() {
        return real;
    }
    let folder = path.parent().map(Path::canonicalize);
    match (folder, path.file_name()) {
        (Some(Ok(folder)), Some(name)) => folder.join(name),
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::spec::ProcessSpec;

    fn allow(list: &[&str]) -> Allow {
        let list = config::options::Paths(list.iter().map(PathBuf::from).collect());
        let process = ProcessSpec {
            allow: Some(list),
            ..ProcessSpec::default()
        };
        Allow::new(
            &ServeOptions::new(process, 1),
            &SocketAccess::default(),
            Grants::default(),
            &Arc::default(),
        )
    }

    #[test]
    fn sockets_for_other_users_need_startup() {
        let socket = |more: &str| {
            let text =
                format!("[[vhost-user-blk]]\nsocket = \"/run/a\"\nvolume = \"mem://1M\"\n{more}");
            DiskSpec::all(&toml::from_str(&text).unwrap()).remove(0)
        };
        let mut allow = allow(&["/run"]);
        allow.check(&socket("")).unwrap();
        allow.check(&socket("socket-mode = \"0600\"")).unwrap();
        for more in [
            "socket-mode = \"0660\"",
            "socket-group = 7",
            "socket-owner = 7",
        ] {
            let error = allow.check(&socket(more)).unwrap_err();
            assert_eq!(error.kind, control::ErrorKind::Unsupported, "{more}");
        }
        allow.access.group = Some("7".parse().unwrap());
        assert!(allow.check(&socket("")).is_err(), "as [process] says");
        // The configuration had this group, and no other access control, at the start.
        let process = ProcessSpec {
            allow: Some(config::options::Paths(vec!["/run".into()])),
            ..ProcessSpec::default()
        };
        allow.grants = Grants::new(&ServeOptions::new(process, 1), &allow.access, &[]);
        allow.check(&socket("")).unwrap();
        allow.check(&socket("socket-mode = \"0660\"")).unwrap();
        for more in [
            "socket-mode = \"0666\"",
            "socket-owner = 7",
            "socket-group = 8",
        ] {
            assert!(allow.check(&socket(more)).is_err(), "{more}");
        }
        allow.places = None;
        allow.check(&socket("")).unwrap();
    }

    #[test]
    fn connections_are_limited_to_allowed_servers() {
        let listed = [
            "/x",
            "nbd://10.0.0.2/",
            "nbd+unix:///?socket=/run/nbd.sock",
            "nvme+tcp://10.0.0.4/",
        ];
        let allow = allow(&listed);
        assert_eq!(allow.places, Some(vec!["/x".into()]));
        for fine in [
            "nbd://10.0.0.2:10809/a?iops=5",
            "nbd+unix:///b?socket=/run/nbd%2esock&offset=1M",
            "nvme+tcp://10.0.0.4:4420/nqn.2014-08.org.vnvme:far/1",
            "nbd://10.0.0.2/a?luks=/x/key&luks-header=/x/header",
        ] {
            allow.check_volume(fine).unwrap();
        }
        for (bad, why) in [
            ("nbd://10.0.0.2:7/a", "allow = [\"nbd://10.0.0.2:7/\""),
            ("nbd://10.0.0.3/a", "allow = [\"nbd://10.0.0.3:10809/\""),
            ("nbd://host/a", "name the server by its address"),
            (
                "nvme+tcp://10.0.0.5/nqn.2014-08.org.vnvme:far/1",
                "allow = [\"nvme+tcp://10.0.0.5:4420/\"",
            ),
            (
                "nvme+tcp://10.0.0.4,10.0.0.5/nqn.2014-08.org.vnvme:far/1",
                "allow = [\"nvme+tcp://10.0.0.5:4420/\"",
            ),
            ("nbd://10.0.0.2/a?luks=/x/key", "luks-header=PATH"),
            (
                "nbd+unix:///b?socket=/run/nbd/x&iops=5",
                "allow = [\"nbd+unix:///?socket=/run/nbd/x\"",
            ),
        ] {
            let error = allow.check_volume(bad).unwrap_err();
            assert!(error.message.contains(why), "{error}");
            let open = Allow {
                places: None,
                ..self::allow(&[])
            };
            open.check_volume(bad).unwrap();
        }
    }

    #[test]
    fn paths_are_limited_to_allowed_folders() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        std::fs::create_dir_all(path("a/b")).unwrap();
        std::fs::create_dir(path("ab")).unwrap();
        std::os::unix::fs::symlink(path("ab"), path("a/link")).unwrap();
        std::fs::write(path("ab/x"), "").unwrap();
        let allow = allow(&[&path("a")]);
        for fine in ["a/x", "a/b/x", "a/b/../x", "ab/../a/x"] {
            allow.check_volume(&path(fine)).unwrap();
            allow
                .check_volume(&format!("file://{}?direct=off", path(fine)))
                .unwrap();
        }
        let image =
            |path: &str| format!("qcow2://{path}?backing={}", dir.path().join("ab").display());
        let error = allow.check_volume(&image(&path("a/x"))).unwrap_err();
        assert!(error.message.contains("option allow"), "{error}");
        allow
            .check_volume(&format!("qcow2://{}?backing={}", path("a/x"), path("a")))
            .unwrap();
        for bad in [
            "ab/x",
            "x",
            "a/../ab/x",
            "a/link/x",
            "a/link/y",
            "a/none/../../ab/x",
        ] {
            let error = allow.check_volume(&path(bad)).unwrap_err();
            assert!(error.message.contains("option allow"), "{bad}: {error}");
        }
        allow.check_volume("mem://1M").unwrap();
        let encrypted = |key: &str, header: &str| {
            let (key, header) = (path(key), path(header));
            allow.check_volume(&format!("mem://1M?luks={key}&luks-header={header}"))
        };
        encrypted("a/key", "a/header").unwrap();
        for (key, header) in [("ab/key", "a/header"), ("a/key", "ab/header")] {
            let error = encrypted(key, header).unwrap_err();
            assert!(error.message.contains("option allow"), "{error}");
        }
        assert!(allow.check_volume("mem://1M?luks=cred:..").is_err());
        for device in ["nvme://0000:01:00.0/1", "controller+mem://1M"] {
            let error = allow.check_volume(device).unwrap_err();
            assert_eq!(error.kind, control::ErrorKind::Unsupported);
        }
        let nothing = super::tests::allow(&[]).check_volume("/x").unwrap_err();
        assert!(nothing.message.contains("allows nothing"), "{nothing}");
    }
}
