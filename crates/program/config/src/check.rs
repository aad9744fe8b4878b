//! Validation of the whole configuration before anything is opened: duplicates, missing values,
//! contradictions.

use crate::choices::PathChoice;
use crate::disk::{Disk, DiskSpec, Specs};
use crate::origin::Origin;
use crate::spec::{ControllerSpec, NamespaceSpec, hex, to_hex};
use crate::volumes::ensure_decryptable;
use anyhow::{Result, anyhow, bail, ensure};
use controller::{ConfigError, ControllerConfig};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Refuses values that a namespace cannot have, and duplicates of values that have to be unique. A
/// guest or a VMM that looks a disk up by a duplicate would find either of the two.
///
/// Only given values count. Serial numbers and identifiers that are made from volumes are equal
/// where two controllers show the same file to two guests, which may be intended. The serial number
/// of a virtio disk is a name for its guest alone ("ROOT"), and may be repeated.
///
/// The links of a path for which `is_unanswered` returns true are not resolved: its file system
/// does not answer.
///
/// # Errors
/// A sentence for the user.
pub fn check(
    specs: &Specs,
    control: Option<&Path>,
    is_unanswered: &dyn Fn(&Path) -> bool,
) -> Result<()> {
    let mut seen = UniqueValues::new(is_unanswered);
    let none = Origin::default();
    let sockets = specs
        .iter()
        .filter_map(|disk| Some((disk.socket()?, disk.origin())));
    let control = control.map(|path| (path, &none));
    for (socket, origin) in sockets.chain(control) {
        origin.place("socket", seen.enter_path("socket", socket))?;
    }
    for disk in DiskSpec::all(specs) {
        disk.origin().place("name", check_name(&disk.name()))?;
    }
    specs.iter().try_for_each(|disk| disk.check(&mut seen))
}

/// Refuses a controller that has no namespace, and can get none: in a process with a fixed set of
/// disks. Under `vnvme daemon` namespaces are attached while it runs, and the last one may have
/// been detached.
///
/// # Errors
/// A sentence for the user.
pub fn check_filled(specs: &Specs) -> Result<()> {
    specs.iter().try_for_each(Disk::check_filled)
}

/// Maximum length of a disk's name in bytes, that of a file name.
const MAX_NAME: usize = 255;

/// A name that cannot stand in a line, or in an address of the control API, would leave a disk that
/// nobody can ask for.
fn check_name(name: &str) -> Result<()> {
    let why = match name {
        "" => "is empty",
        "." | ".." => "has a special meaning in paths",
        name if name.chars().any(char::is_control) => "has a control character",
        name if name.len() > MAX_NAME => "has more than 255 bytes",
        _ => return Ok(()),
    };
    let shown: String = name.chars().take(64).collect();
    bail!(
        "the name {shown:?} {why}; without a name of its own, a disk has that of its socket's \
         file: write name = \"...\" into it"
    )
}

/// Values that must be unique, of all disks of the configuration that were checked so far.
pub struct UniqueValues<'a> {
    /// Names of the values' kinds, and the values in a form that is equal for equal values.
    values: HashSet<(&'static str, OsString)>,
    /// Values of the disks in each subsystem, by the subsystem's name.
    subsystems: HashMap<String, InOne>,
    is_unanswered: &'a dyn Fn(&Path) -> bool,
}

/// Values of the disks of one subsystem that were checked so far.
struct InOne {
    serial: Option<String>,
    subnqn: Option<String>,
    cntlids: HashSet<u16>,
    namespaces: HashMap<u32, NamespaceSpec>,
}

impl<'a> UniqueValues<'a> {
    /// Creates an empty set of values. Links of a path for which `is_unanswered` returns true are
    /// not resolved.
    pub fn new(is_unanswered: &'a dyn Fn(&Path) -> bool) -> Self {
        Self {
            values: HashSet::new(),
            subsystems: HashMap::new(),
            is_unanswered,
        }
    }

    /// Enters a value, which the configuration writes as `text`.
    ///
    /// # Errors
    /// A disk before has it.
    pub fn enter(
        &mut self,
        what: &'static str,
        value: impl Into<OsString>,
        text: impl Display,
    ) -> Result<()> {
        let first = self.values.insert((what, value.into()));
        ensure!(first, "the {what} {text} is given twice");
        Ok(())
    }

    /// Enters the path of a file that belongs to one disk.
    ///
    /// # Errors
    /// A disk before has it.
    pub fn enter_path(&mut self, what: &'static str, path: &Path) -> Result<()> {
        self.enter(what, place(path, self.is_unanswered), path.display())
    }

    /// Enters an identifier of a namespace, written in hexadecimal digits.
    fn check_id<const N: usize>(
        &mut self,
        (key, what): (&str, &'static str),
        text: &Option<String>,
        origin: &Origin,
    ) -> Result<()> {
        let Some(text) = text else {
            return Ok(());
        };
        let entered = hex::<N>(key, text).and_then(|id| match id {
            // All zeroes mean that there is no identifier (NVMe NVM 1.1, 4.1.5.1).
            id if id == [0; N] => Ok(()),
            id => self.enter(what, to_hex(&id), text),
        });
        origin.place(key, entered)
    }

    /// Enters serial number and NQN of a subsystem.
    ///
    /// # Errors
    /// A disk before has one of them.
    pub fn check_names(
        &mut self,
        serial: &Option<String>,
        subnqn: &Option<String>,
        origin: &Origin,
    ) -> Result<()> {
        if let Some(serial) = serial {
            // The guest sees the serial number padded with spaces (NVMe Base 2.1, 5.1.13.2.1).
            let entered = self.enter("serial number", serial.trim_end(), serial);
            origin.place("serial", entered)?;
        }
        if let Some(subnqn) = subnqn {
            let entered = self.enter("subsystem NQN", subnqn, subnqn);
            origin.place("subnqn", entered)?;
        }
        Ok(())
    }

    /// Checks the namespaces of a disk. `of`: the controller, if it is one, that may share them.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check_namespaces(
        &mut self,
        of: Option<&ControllerSpec>,
        namespaces: &[NamespaceSpec],
    ) -> Result<()> {
        let mut nsids = HashSet::new();
        let mut ana_states = HashMap::new();
        for (namespace, position) in namespaces.iter().zip(1..) {
            let origin = &namespace.origin;
            let nsid = namespace.nsid.unwrap_or(position);
            if !nsids.insert(nsid) {
                let why = format!("the namespace ID {nsid} is given twice");
                return origin.place("nsid", Err(anyhow!(why)));
            }
            origin.place("volume", ensure_decryptable(&namespace.volume))?;
            // Volumes and exports have larger ones, too: their errors would lead to this one.
            if let Some(size) = namespace
                .block_size
                .filter(|size| !matches!(size, 512 | 4096))
            {
                let volume = &namespace.volume;
                let why = format!(
                    "{volume}: a block size of {size} bytes is not possible for a namespace: it \
                     is 512 or 4096"
                );
                return Err(origin.error("block-size", why));
            }
            let shares = of.is_some_and(|controller| controller.subsystem.is_some());
            check_zones(namespace, of.is_none())?;
            check_placement(namespace, of.is_none() || shares)?;
            check_metadata(namespace, of.is_none() || shares)?;
            check_formats(namespace, of.is_none(), shares)?;
            if namespace.reservations.is_some() && !shares {
                let why = "reservations needs a disk with subsystem";
                return Err(origin.error("reservations", why));
            }
            if !shares {
                let said = [
                    ("ana-group", namespace.ana_group.is_some()),
                    ("ana-state", namespace.ana_state.is_some()),
                ];
                refuse(origin, &said, "needs a disk with subsystem")?;
            }
            let (group, state) = (namespace.ana_group(), namespace.ana_state);
            let state = state.unwrap_or_default();
            if *ana_states.entry(group).or_insert(state) != state {
                let why = format!(
                    "another namespace of the disk in ANA group {group} has a different \
                     ana-state: the state belongs to the group"
                );
                return Err(origin.error("ana-state", why));
            }
            if let Some(controller) = of
                && self.is_known(controller, nsid, namespace)?
            {
                continue;
            }
            self.check_id::<16>(("nguid", "NGUID"), &namespace.nguid, origin)?;
            self.check_id::<8>(("eui64", "EUI-64"), &namespace.eui64, origin)?;
            self.check_id::<16>(("uuid", "UUID"), &namespace.uuid, origin)?;
        }
        Ok(())
    }

    /// Checks a controller against the other disks of its subsystem. Returns whether it is the
    /// first of them: later disks have the same values.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check_subsystem(&mut self, controller: &ControllerSpec) -> Result<bool> {
        let origin = &controller.origin;
        let Some(name) = &controller.subsystem else {
            let said = [
                ("cntlid", controller.cntlid.is_some()),
                ("host-id", controller.host_id.is_some()),
            ];
            refuse(origin, &said, "needs subsystem")?;
            return Ok(true);
        };
        if name.is_empty() || name.len() > MAX_NAME {
            let why = "the name of a subsystem has 1 to 255 bytes";
            return Err(origin.error("subsystem", why));
        }
        if let Some(text) = &controller.host_id {
            let id = origin.place("host-id", hex::<16>("host-id", text))?;
            let named = ensure_named(id);
            origin.place("host-id", named)?;
        }
        let Some(cntlid) = controller.cntlid else {
            let why = "a disk with subsystem needs cntlid, a number unique in the subsystem";
            return Err(origin.error("subsystem", why));
        };
        let first = !self.subsystems.contains_key(name);
        let one = self.subsystems.entry(name.clone());
        let one = one.or_insert_with(|| InOne {
            serial: controller.serial.clone(),
            subnqn: controller.subnqn.clone(),
            cntlids: HashSet::new(),
            namespaces: HashMap::new(),
        });
        for (key, same) in [
            ("serial", one.serial == controller.serial),
            ("subnqn", one.subnqn == controller.subnqn),
        ] {
            if !same {
                let why = format!("another disk of the subsystem {name} has another {key}");
                return Err(origin.error(key, why));
            }
        }
        if !one.cntlids.insert(cntlid) {
            let why = format!("another disk of the subsystem {name} has the cntlid {cntlid}");
            return Err(origin.error("cntlid", why));
        }
        Ok(first)
    }

    /// A namespace of a subsystem that another disk has named already.
    fn is_known(
        &mut self,
        controller: &ControllerSpec,
        nsid: u32,
        namespace: &NamespaceSpec,
    ) -> Result<bool> {
        let origin = &namespace.origin;
        let name = controller.subsystem.as_ref();
        let Some((name, one)) = name.and_then(|name| Some((name, self.subsystems.get_mut(name)?)))
        else {
            return Ok(false);
        };
        if crate::volumes::is_within(&namespace.volume)
            || namespace.path == Some(PathChoice::Direct)
        {
            let why = format!(
                "{}: disks of a subsystem cannot share this kind of volume",
                namespace.volume
            );
            return Err(origin.error("volume", why));
        }
        let said = NamespaceSpec {
            nsid: Some(nsid),
            // The ANA state differs between disks.
            ana_state: None,
            ana_group: Some(namespace.ana_group()),
            origin: Origin::default(),
            ..namespace.clone()
        };
        match one.namespaces.get(&nsid) {
            None => {
                let is_unanswered = self.is_unanswered;
                let others = one.namespaces.values();
                let mut files = others.filter_map(|other| other.reservations.as_ref());
                if let Some(path) = &said.reservations
                    && files.any(|other| place(other, is_unanswered) == place(path, is_unanswered))
                {
                    let why = "another namespace uses this reservation file";
                    return Err(origin.error("reservations", why));
                }
                one.namespaces.insert(nsid, said);
                Ok(false)
            }
            Some(other) if *other == said => Ok(true),
            Some(_) => {
                let why = format!(
                    "namespace {nsid} differs from that of another disk in the subsystem {name}: \
                     a shared namespace needs the same options in both"
                );
                Err(origin.error("volume", why))
            }
        }
    }
}

/// Refuses the first of the keys that the configuration states.
///
/// # Errors
/// The key and `why`.
pub fn refuse(origin: &Origin, stated: &[(&str, bool)], why: &str) -> Result<()> {
    match stated.iter().find(|(_, is_stated)| *is_stated) {
        Some((key, _)) => Err(origin.error(key, format!("{key} {why}"))),
        None => Ok(()),
    }
}

/// Checks that a Host Identifier is not all zeroes, which identifies no host.
fn ensure_named(host: [u8; 16]) -> Result<()> {
    ensure!(host != [0; 16], "host-id must not be all zeroes");
    Ok(())
}

/// Checks model, serial number and other identity fields of a controller; errors name the options.
///
/// # Errors
/// A sentence for the user.
pub fn check_config(config: &ControllerConfig, origin: &Origin) -> Result<()> {
    match config.check() {
        Ok(()) => Ok(()),
        Err(
            error @ (ConfigError::Text { field, .. }
            | ConfigError::LeadingSpace { field, .. }
            | ConfigError::Range { field, .. }),
        ) => {
            let key = field.replace('_', "-");
            let why = error.to_string().replacen(field, &key, 1);
            Err(origin.error(&key, why))
        }
        Err(error) => origin.place("", Err(error.into())),
    }
}

/// Checks the zone options of a namespace. `remote`: the namespace is for other hosts.
fn check_zones(namespace: &NamespaceSpec, remote: bool) -> Result<()> {
    let origin = &namespace.origin;
    if namespace.zone_size.is_none() {
        let said = [
            ("zone-capacity", namespace.zone_capacity.is_some()),
            ("max-open-zones", namespace.max_open_zones.is_some()),
            ("max-active-zones", namespace.max_active_zones.is_some()),
            ("zone-table", namespace.zone_table.is_some()),
            ("zrwa-size", namespace.zrwa_size.is_some()),
        ];
        refuse(origin, &said, "has no effect without zone-size")?;
    }
    if namespace.zrwa_size.is_none() {
        let said = [
            ("zrwa-granularity", namespace.zrwa_granularity.is_some()),
            ("zrwa-resources", namespace.zrwa_resources.is_some()),
        ];
        refuse(origin, &said, "has no effect without zrwa-size")?;
    }
    let direct = namespace.path == Some(PathChoice::Direct);
    if namespace.zone_size.is_some() && (remote || direct) {
        let why =
            "a zoned namespace is not for other hosts, and its commands take the generic path";
        return Err(origin.error("zone-size", why));
    }
    Ok(())
}

/// Checks the placement options of a namespace.
fn check_placement(namespace: &NamespaceSpec, shared: bool) -> Result<()> {
    let origin = &namespace.origin;
    if namespace.fdp_handles.is_none() {
        let said = [
            ("fdp-unit", namespace.fdp_unit.is_some()),
            ("fdp-table", namespace.fdp_table.is_some()),
        ];
        refuse(origin, &said, "has no effect without fdp-handles")?;
    }
    let direct = namespace.path == Some(PathChoice::Direct);
    let other = shared || direct || namespace.zone_size.is_some();
    if namespace.fdp_handles.is_some() && other {
        let why = "placement handles are of one disk, without subsystem and zones, and not for \
                   other hosts; its commands take the generic path";
        return Err(origin.error("fdp-handles", why));
    }
    Ok(())
}

/// Checks the metadata options of a namespace.
fn check_metadata(namespace: &NamespaceSpec, shared: bool) -> Result<()> {
    let origin = &namespace.origin;
    if namespace.metadata.is_some()
        && namespace.metadata_size.is_none()
        && namespace.format_file.is_none()
    {
        let why = "metadata has no effect without metadata-size or format-file";
        return Err(origin.error("metadata", why));
    }
    if namespace.metadata_size.is_none() {
        let said = [
            ("metadata-extended", namespace.metadata_extended.is_some()),
            ("protection", namespace.protection.is_some()),
        ];
        refuse(origin, &said, "has no effect without metadata-size")?;
    }
    if namespace.protection.unwrap_or_default() == 0 {
        let said = [
            ("guard", namespace.guard.is_some()),
            ("protection-first", namespace.protection_first.is_some()),
            ("storage-tag", namespace.storage_tag.is_some()),
            ("storage-tag-mask", namespace.storage_tag_mask.is_some()),
        ];
        refuse(origin, &said, "has no effect without protection")?;
    }
    let direct = namespace.path == Some(PathChoice::Direct);
    let accounted = namespace.zone_size.is_some() || namespace.fdp_handles.is_some();
    if namespace.metadata_size.is_some() && (shared || direct || accounted) {
        let why = "metadata is of one disk, without subsystem, zones and placement handles, and \
                   not for other hosts; its commands take the generic path";
        return Err(origin.error("metadata-size", why));
    }
    Ok(())
}

/// Checks the LBA format options of a namespace.
fn check_formats(namespace: &NamespaceSpec, for_hosts: bool, shares: bool) -> Result<()> {
    let direct = namespace.path == Some(PathChoice::Direct);
    let accounted = namespace.zone_size.is_some() || namespace.fdp_handles.is_some();
    if namespace.format_file.is_some() && (for_hosts || direct || accounted) {
        let why = "a guest chooses the LBA format of namespaces without zones and placement \
                   handles, and not for other hosts; their commands take the generic path";
        return Err(namespace.origin.error("format-file", why));
    }
    let kept = namespace.metadata.is_some();
    if kept && shares {
        let why = "metadata is of one disk: namespaces of a subsystem have LBA formats without";
        return Err(namespace.origin.error("metadata", why));
    }
    if namespace.format_file.is_some() && namespace.metadata_size.is_some() && !kept {
        let why = "metadata-size with format-file needs the key metadata, the file of the blocks' \
                   metadata";
        return Err(namespace.origin.error("metadata-size", why));
    }
    Ok(())
}

/// Returns the absolute path of a file, with links and dots resolved, to compare paths.
fn place(path: &Path, is_unanswered: &dyn Fn(&Path) -> bool) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if !is_unanswered(&path) => parent
            .canonicalize()
            .map_or_else(|_| path.clone(), |parent| parent.join(name)),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(file: &str) -> Result<()> {
        check(
            &toml::from_str(file).unwrap(),
            Some(Path::new("/run/control")),
            &|_| false,
        )
    }

    fn two(first: &str, second: &str) -> String {
        let one = |socket: &str, more: &str| {
            let (of_controller, of_namespace) = more.split_once('|').unwrap_or((more, ""));
            format!(
                "[[controller]]\nsocket = \"{socket}\"\n{of_controller}\n[[controller.namespace]]\nvolume = \"a\"\n\
                 {of_namespace}\n"
            )
        };
        one("/run/a", first) + &one("/run/b", second)
    }

    #[test]
    fn duplicates_are_refused() {
        let nguid = "|nguid = \"00112233-4455-6677-8899-aabbccddeeff\"";
        let again = "|nguid = \"00112233445566778899AABBCCDDEEFF\"";
        let export = "[[vhost-user-blk]]\nsocket = \"/run/./a\"\nvolume = \"b\"\n";
        let table = [
            (two("serial = \"S\"", "serial = \"S \""), "serial number S "),
            (
                two("subnqn = \"nqn.x\"", "subnqn = \"nqn.x\""),
                "subsystem NQN nqn.x",
            ),
            (two(nguid, again), "NGUID 00112233445566778899AABBCCDDEEFF"),
            (
                two(
                    "|uuid = \"00112233-4455-6677-8899-aabbccddeeff\"",
                    "|uuid = \"00112233445566778899aabbccddeeff\"",
                ),
                "UUID 00112233445566778899aabbccddeeff",
            ),
            (
                two(
                    "|eui64 = \"0011223344556677\"",
                    "|eui64 = \"0011223344556677\"",
                ),
                "EUI-64 0011223344556677",
            ),
            (two("", "") + export, "socket /run/./a"),
            (
                "[[vhost-user-blk]]\nsocket = \"/run/control\"\nvolume = \"b\"\n".into(),
                "socket /run/control",
            ),
            (
                "[[ublk]]\nvolume = \"a\"\nid = 3\n[[ublk]]\nvolume = \"b\"\nid = 3\n".into(),
                "ublk device 3",
            ),
        ];
        for (file, words) in table {
            let error = checked(&file).expect_err(words).to_string();
            let wanted = format!("the {words} is given twice");
            assert_eq!(error, wanted, "{file}");
        }
    }

    #[test]
    fn format_file_needs_matching_metadata() {
        let checked = |options: &str| {
            checked(&format!(
                "[[controller]]\nsocket = \"/run/a\"\n[[controller.namespace]]\n\
                 volume = \"a\"\n{options}"
            ))
        };
        let (format, metadata) = ("format-file = \"f\"\n", "metadata = \"m\"\n");
        checked(&format!("{format}{metadata}")).unwrap();
        let size = "metadata-size = 8\nprotection = 1\n";
        checked(&format!("{format}{metadata}{size}")).unwrap();
        for (options, words) in [
            (metadata.into(), "metadata has no effect without"),
            (
                format!("{format}{size}"),
                "needs the key metadata, the file",
            ),
            (
                format!("{format}{metadata}zone-size = \"1M\"\n"),
                "a guest chooses the LBA format",
            ),
            (
                format!("{format}{metadata}protection = 1\n"),
                "protection has no effect without metadata-size",
            ),
        ] {
            let error = checked(&options).unwrap_err().to_string();
            assert!(error.contains(words), "{options}: {error}");
        }
    }

    #[test]
    fn shared_settings_of_subsystem_must_agree() {
        let disk = |number: u32, of_disk: &str, of_namespace: &str| {
            format!(
                "[[controller]]\nsocket = \"/run/{number}\"\nsubsystem = \"s\"\n{of_disk}\n\
                 [[controller.namespace]]\nvolume = \"a\"\n{of_namespace}\n"
            )
        };
        let one = disk(1, "cntlid = 1", "");
        let nguid = "nguid = \"00112233445566778899aabbccddeeff\"";
        checked(&(one.clone() + &disk(2, "cntlid = 2", ""))).unwrap();
        // Each reaches it in its own way, and the usual group may be named.
        let ana = "ana-group = 1\nana-state = \"inaccessible\"";
        checked(&(one.clone() + &disk(2, "cntlid = 2", ana))).unwrap();
        let same = disk(1, "cntlid = 1\nserial = \"S\"", nguid)
            + &disk(2, "cntlid = 2\nserial = \"S\"", nguid);
        checked(&same).unwrap();
        let host = "cntlid = 2\nhost-id = \"00000000000000000000000000000000\"";
        let alone = "[[controller]]\nsocket = \"/run/3\"\n";
        let volume = "[[controller.namespace]]\nvolume = \"b\"\n";
        for (other, words) in [
            (disk(2, "cntlid = 1", ""), "has the cntlid 1"),
            (disk(2, "", ""), "needs cntlid"),
            (disk(2, "cntlid = 2\nserial = \"S\"", ""), "another serial"),
            (disk(2, "cntlid = 2", "read-only = true"), "differs from"),
            (disk(2, "cntlid = 2", nguid), "differs from"),
            (
                disk(2, "cntlid = 2", "reservations = \"r\""),
                "differs from",
            ),
            (disk(2, "cntlid = 2", "ana-group = 2"), "differs from"),
            (disk(2, "cntlid = 2", "zone-size = \"1M\""), "differs from"),
            (
                disk(2, "cntlid = 2", "")
                    + "[[controller.namespace]]\nvolume = \"b\"\nana-state = \"change\"\n",
                "the state belongs to the group",
            ),
            (
                format!("{alone}{volume}ana-state = \"change\"\n"),
                "ana-state needs a disk with subsystem",
            ),
            (disk(2, host, ""), "must not be all zeroes"),
            (
                format!("{alone}cntlid = 2\n{volume}"),
                "cntlid needs subsystem",
            ),
            (
                format!("{alone}{volume}reservations = \"r\"\n"),
                "reservations needs a disk with subsystem",
            ),
            (
                format!("{alone}subsystem = \"\"\ncntlid = 3\n{volume}"),
                "1 to 255 bytes",
            ),
        ] {
            let file = one.clone() + &other;
            let error = checked(&file).expect_err(words).to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
        let other = disk(1, "cntlid = 1", "reservations = \"r\"")
            + "[[controller.namespace]]\nvolume = \"b\"\nreservations = \"./r\"\n";
        let error = checked(&other).unwrap_err().to_string();
        assert!(error.contains("uses this reservation file"), "{error}");
    }

    #[test]
    fn disk_names_are_validated() {
        let named = |name: &str| {
            let name = toml::Value::from(name);
            checked(&two(&format!("name = {name}"), ""))
        };
        for fine in ["a", "a/b", "vm 7", "ü", "...", &"x".repeat(255)] {
            named(fine).unwrap();
        }
        let long = "x".repeat(256);
        for bad in ["", ".", "..", "a\nb", "\u{1b}[2J", "a\0", &long] {
            let error = named(bad).unwrap_err().to_string();
            assert!(error.contains("write name ="), "{bad:?}: {error}");
            assert!(!error.chars().any(char::is_control), "{error:?}");
        }
        let of_socket = "[[ublk]]\nvolume = \"a\"\n[[vhost-user-blk]]\nvolume = \"a\"\n\
                         socket = \"/run/a\\nb.sock\"\n";
        assert!(checked(of_socket).is_err());
    }

    #[test]
    fn encryption_of_driven_devices_is_refused() {
        let namespace = |url: &str| {
            let controller = "[[controller]]\nsocket = \"/run/a\"\n[[controller.namespace]]\n";
            checked(&format!("{controller}volume = \"{url}?luks=/k\""))
        };
        for url in [
            "nvme://0000:44:00.0/1",
            "vfio-user:///s/1",
            "controller+mem://1M",
        ] {
            let error = format!("{:#}", namespace(url).unwrap_err());
            assert!(error.contains("luks= is not possible"), "{error}");
        }
        for url in ["nvme.raw", "nbd://10.0.0.2/x", "/dev/nvme0n1"] {
            namespace(url).unwrap();
        }
    }

    #[test]
    fn namespace_block_size_is_validated() {
        for size in [512, 4096] {
            checked(&two("", &format!("|block-size = {size}"))).unwrap();
        }
        for size in [0, 1000, 8192] {
            let error = checked(&two("", &format!("|block-size = {size}"))).unwrap_err();
            let wanted = format!(
                "a: a block size of {size} bytes is not possible for a namespace: it is 512 or 4096"
            );
            assert_eq!(error.to_string(), wanted);
        }
    }

    #[test]
    fn distinct_values_are_accepted() {
        let zeroes = "|eui64 = \"0000000000000000\"";
        for file in [
            two("serial = \"S\"", "serial = \"T\""),
            two("serial = \"S\"", ""),
            two("", ""),
            two(zeroes, zeroes),
            "[[ublk]]\nvolume = \"a\"\n[[ublk]]\nvolume = \"b\"\n".into(),
            "[[vhost-user-blk]]\nsocket = \"/run/a\"\nvolume = \"a\"\nserial = \"ROOT\"\n\
             [[vhost-user-blk]]\nsocket = \"/run/b\"\nvolume = \"b\"\nserial = \"ROOT\"\n"
                .into(),
        ] {
            if let Err(error) = checked(&file) {
                panic!("{error}: {file}");
            }
        }
    }
}
