//! A QEMU that has the vfio-user client (10.1 or newer): the system's own, else Debian's package
//! unpacked into the cache; and whether KVM can run the guest here.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::{self, Cache};
use crate::guest::Guest;
use crate::progress::say;
use crate::tree::{PackageSet, Tree};

/// The first version with `vfio-user-pci`.
const NEEDED: (u32, u32) = (10, 1);

/// Debian's suites with it, best first.
const WISHES: [PackageSet; 3] = [
    wish(&["trixie", "trixie-backports"], Some("trixie-backports")),
    wish(&["forky"], None),
    wish(&["sid"], None),
];

/// Dependencies of QEMU's packages that no QEMU needs here.
pub(crate) const EXCLUDED_PACKAGES: [&str; 16] = [
    "adduser",
    "coreutils",
    "debconf",
    "dpkg",
    "ipxe-qemu",
    "libapparmor",
    "libdb5",
    "libpam",
    "login",
    "openssl-",
    "passwd",
    "perl",
    "qemu-utils",
    "systemd",
    "tar",
    "tzdata",
];

const fn wish(suites: &'static [&'static str], release: Option<&'static str>) -> PackageSet {
    PackageSet {
        name: "qemu",
        suites,
        release,
        packages: &["qemu-system-x86"],
        without: &EXCLUDED_PACKAGES,
    }
}

/// The firmware for UEFI guests; fetched only when a guest asks for it.
const OVMF: PackageSet = PackageSet {
    name: "ovmf",
    suites: &["trixie"],
    release: None,
    packages: &["ovmf"],
    without: &[],
};

/// A QEMU that can be started.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The words that start it, before its options.
    pub words: Vec<OsString>,
    /// Environment of QEMU.
    pub envs: Vec<(String, OsString)>,
    /// Version line of QEMU.
    pub version: String,
}

/// Executor of the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The processor.
    Kvm,
    /// QEMU's translator, with a thread per virtual processor.
    Tcg,
}

impl Qemu {
    /// Finds one, fetching it if need be.
    pub fn find(cache: &Cache) -> Result<Qemu> {
        if let Some(path) = std::env::var_os("VNVME_QEMU").filter(|v| !v.is_empty()) {
            return Qemu::check(vec![path], Vec::new()).context("VNVME_QEMU cannot be used");
        }
        if let Ok(qemu) = Qemu::check(vec!["qemu-system-x86_64".into()], Vec::new()) {
            return Ok(qemu);
        }
        // A cached tree of any suite needs no mirror.
        let cached = WISHES
            .iter()
            .find(|wish| Tree::cached(cache, wish).is_some());
        let mut failures = String::new();
        for wish in cached.into_iter().chain(&WISHES) {
            match Qemu::from_debian(cache, wish) {
                Ok(qemu) => return Ok(qemu),
                Err(e) => {
                    say(format!("qemu: not from {}: {e:#}", wish.suites.join("+")));
                    failures.push_str(&format!("\n{}: {e:#}", wish.suites.join("+")))
                }
            }
        }
        bail!(
            "no QEMU with vfio-user-pci (10.1 or newer): the system has none, and Debian's could not be used:{failures}"
        )
    }

    fn from_debian(cache: &Cache, wish: &PackageSet) -> Result<Qemu> {
        let tree = Tree::fetch(cache, wish, |packages| {
            let qemu = packages.iter().find(|p| p.name == "qemu-system-x86");
            let version = qemu.map_or("", |p| p.version.as_str());
            if parse_version(version) < Some(NEEDED) {
                bail!("has QEMU {version:?}, which is too old");
            }
            Ok(())
        })?;
        let program = tree.program("qemu-system-x86_64")?;
        let mut words = tree.tool_words(&program)?;
        for data in ["usr/share/qemu", "usr/share/seabios"] {
            words.push("-L".into());
            words.push(tree.root().join(data).display().to_string());
        }
        let modules = tree.root().join("usr/lib/x86_64-linux-gnu/qemu");
        Qemu::check(
            words.into_iter().map(OsString::from).collect(),
            vec![("QEMU_MODULE_DIR".into(), modules.into())],
        )
    }

    /// Accepts a QEMU that is new enough and knows the device.
    fn check(words: Vec<OsString>, envs: Vec<(String, OsString)>) -> Result<Qemu> {
        let ask = |option: &[&str]| -> Result<String> {
            let (program, args) = words.split_first().context("an empty command")?;
            let out = Command::new(program)
                .args(args)
                .args(option)
                .envs(envs.iter().map(|(k, v)| (k, v)))
                .output()
                .with_context(|| format!("running {}", program.to_string_lossy()))?;
            if !out.status.success() {
                bail!(
                    "{} {}: {}",
                    program.to_string_lossy(),
                    option.join(" "),
                    String::from_utf8_lossy(&out.stderr).trim()
                );
            }
            Ok(String::from_utf8_lossy(&out.stdout).into_owned())
        };
        let version = ask(&["--version"])?;
        let version = version.lines().next().unwrap_or_default().to_string();
        let number = version.split("version ").nth(1).unwrap_or_default();
        if parse_version(number) < Some(NEEDED) {
            bail!("{version:?} is older than {}.{}", NEEDED.0, NEEDED.1);
        }
        if !ask(&["-device", "help"])?.contains("\"vfio-user-pci\"") {
            bail!("{version:?} was built without vfio-user-pci");
        }
        Ok(Qemu {
            words,
            envs,
            version,
        })
    }

    /// KVM if it really runs the guest's kernel here, else TCG. The trial costs a boot, so its
    /// verdict is kept until the host's kernel, QEMU or the guest's kernel change.
    pub fn accel(&self, cache: &Cache) -> Result<Accel> {
        match std::env::var("VNVME_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Accel::Kvm),
            Ok("tcg") => return Ok(Accel::Tcg),
            Ok("") | Err(_) => {}
            Ok(other) => bail!("VNVME_ACCEL is {other:?}; it may be kvm or tcg"),
        }
        if fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_err()
        {
            return Ok(Accel::Tcg);
        }
        let image = crate::image::Image::get(cache)?;
        let host = fs::read_to_string("/proc/version").unwrap_or_default();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let kernel = image.kernel.display().to_string();
        let key = cache::key(&["kvm-1", &host, &boot, &self.version, &kernel]);
        let verdict = cache.path(format!("kvm-{key}"));
        let read = || match fs::read_to_string(&verdict).ok()?.as_str() {
            "works" => Some(Accel::Kvm),
            "fails" => Some(Accel::Tcg),
            _ => None,
        };
        if let Some(accel) = read() {
            return Ok(accel);
        }
        let _lock = cache.lock("kvm")?;
        if let Some(accel) = read() {
            return Ok(accel);
        }
        say("qemu: trying whether KVM can run a guest here (10 s at most)");
        let tried = Guest::builder("kvm-trial")
            .accel(Accel::Kvm)
            .boot_limit(Duration::from_secs(10))
            .boot();
        let (word, accel) = match tried {
            Ok(_) => ("works", Accel::Kvm),
            Err(_) => ("fails", Accel::Tcg),
        };
        say(format!("qemu: KVM {word}"));
        let part = cache.path(format!("kvm-{key}.part"));
        fs::write(&part, word)?;
        fs::rename(&part, &verdict)?;
        Ok(accel)
    }

    /// OVMF's code and a template of its variable store.
    pub fn ovmf(cache: &Cache) -> Result<(PathBuf, PathBuf)> {
        let tree = Tree::fetch(cache, &OVMF, |_| Ok(()))?;
        let dir = tree.root().join("usr/share/OVMF");
        let find = |name: &str| {
            let path = dir.join(name);
            path.is_file()
                .then_some(path)
                .with_context(|| format!("{} holds no {name}", dir.display()))
        };
        Ok((find("OVMF_CODE_4M.fd")?, find("OVMF_VARS_4M.fd")?))
    }
}

/// Major and minor of `1:11.1.3+ds-1` or `11.1.3 (Debian ...)`.
pub(crate) fn parse_version(text: &str) -> Option<(u32, u32)> {
    let text = text.split_once(':').map_or(text, |(_, rest)| rest);
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_versions_are_parsed() {
        assert_eq!(parse_version("1:11.1.3+ds-1~bpo13+1"), Some((11, 1)));
        assert_eq!(parse_version("10.0.13 (Debian 1:10.0.13)"), Some((10, 0)));
        assert_eq!(parse_version(""), None);
        assert!(parse_version("7.2.1") < Some(NEEDED));
        assert!(parse_version("10.1.0") >= Some(NEEDED));
        assert!(parse_version("").is_none() && None < Some(NEEDED));
    }
}
