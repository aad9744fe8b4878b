//! An s390x guest under QEMU's TCG: Debian's kernel with its AP bus and zcrypt driver, busybox, and
//! perl for programs that speak to a device. It is made and reached as the other guests are, by the
//! same init and the same channel.
//!
//! The guest's programs cannot run here, so nothing of it is executed while the image is made:
//! busybox makes its own links and unpacks the modules in the guest.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{self, Cache};
use crate::cpio::Archive;
use crate::guest::{BOOT_LIMIT, Guest, LIFE_LIMIT, Launch};
use crate::kernel;
use crate::progress::say;
use crate::qemu::{EXCLUDED_PACKAGES, parse_version};
use crate::tree::{PackageSet, Tree};

/// Changes when the way an image is made changes.
const RECIPE: &str = "s390x-3";

/// The first version with version 7 of the plugin API.
const NEEDED: (u32, u32) = (11, 1);

/// QEMU, and OpenSSL to compare with. Where Debian has it, best first.
const HOST: [PackageSet; 3] = [
    host(&["trixie", "trixie-backports"], Some("trixie-backports")),
    host(&["forky"], None),
    host(&["sid"], None),
];

const fn host(suites: &'static [&'static str], release: Option<&'static str>) -> PackageSet {
    PackageSet {
        name: "qemu-s390x",
        suites,
        release,
        packages: &["qemu-system-s390x", "openssl"],
        without: &EXCLUDED_PACKAGES,
    }
}

/// The guest's kernel and userland. A mirror may lack packages of this architecture that its index
/// names, so several suites are tried.
const GUEST: [PackageSet; 5] = [
    guest(&["trixie"], None),
    guest(&["bookworm"], None),
    guest(&["trixie", "trixie-backports"], Some("trixie-backports")),
    guest(
        &["bookworm", "bookworm-backports"],
        Some("bookworm-backports"),
    ),
    guest(&["forky"], None),
];

const fn guest(suites: &'static [&'static str], release: Option<&'static str>) -> PackageSet {
    PackageSet {
        name: "s390x",
        suites,
        release,
        packages: &["linux-image-s390x", "busybox-static", "perl-base"],
        without: &[
            "coreutils",
            "cpio",
            "debconf",
            "dpkg",
            "dracut",
            "gawk",
            "initramfs-tools",
            "klibc",
            "kmod",
            "libapparmor",
            "libaudit",
            "libklibc",
            "libmpfr",
            "libpam",
            "libreadline",
            "libseccomp",
            "libssl",
            "libsystemd",
            "linux-base",
            "logsave",
            "mount",
            "openssl-",
            "readline",
            "systemd",
            "tar",
            "udev",
        ],
    }
}

/// Modules that the guest loads, in this order, below the kernel's drivers; the AP bus itself is
/// part of the kernel, and newer kernels contain the console, too.
const MODULES: [&str; 3] = [
    "char/virtio_console",
    "s390/crypto/zcrypt",
    "s390/crypto/zcrypt_cex4",
];

/// Directories of the guest.
const DIRECTORIES: [&str; 15] = [
    "bin",
    "boot",
    "dev",
    "lib",
    "mnt",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr",
    "usr/lib",
    "usr/lib/s390x-linux-gnu",
    PERL,
];

/// Libraries of perl and its modules, with their places in the packages.
const LIBRARIES: [&str; 4] = ["ld64.so.1", "libc.so.6", "libm.so.6", "libcrypt.so.1"];
const LIBRARY_DIR: &str = "lib/s390x-linux-gnu";
const PERL: &str = "usr/lib/s390x-linux-gnu/perl-base";
const PERL_MODULES: [&str; 2] = ["strict.pm", "warnings.pm"];

/// Packages that an s390x guest needs on this machine.
#[derive(Debug)]
pub struct Mainframe {
    host: Tree,
    words: Vec<OsString>,
    version: String,
    guest: Tree,
}

/// Options for starting a guest.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Names its logs.
    pub name: &'a str,
    /// A TCG plugin.
    pub plugin: &'a Path,
    /// The plugin's arguments, `a=1,b=2`.
    pub arguments: &'a str,
    /// Virtual processors.
    pub cpus: u32,
}

impl Mainframe {
    /// Fetches the packages if they are not in the cache. The error names the reason why this
    /// machine cannot have them.
    pub fn fetch(cache: &Cache) -> Result<Mainframe> {
        let (host, words, version) = first_complete(cache, &HOST, |wish| from_debian(cache, wish))
            .with_context(|| {
                format!("no qemu-system-s390x of {}.{} or newer", NEEDED.0, NEEDED.1)
            })?;
        let fetch = |wish: &PackageSet| Tree::fetch_for(cache, wish, "s390x", |_| Ok(()));
        let guest = first_complete(cache, &GUEST, fetch).context("no packages for the guest")?;
        Ok(Mainframe {
            host,
            words,
            version,
            guest,
        })
    }

    /// QEMU's version line.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Runs OpenSSL on the host; answers its standard output.
    pub fn openssl(&self, args: &[&str]) -> Result<Vec<u8>> {
        let mut command = self.host.tool("openssl")?;
        let out = command
            .env("OPENSSL_CONF", "/dev/null")
            .args(args)
            .output()?;
        if !out.status.success() {
            bail!(
                "openssl {}: {}",
                args.join(" "),
                String::from_utf8_lossy(&out.stderr)
            );
        }
        Ok(out.stdout)
    }

    /// Boots a guest and waits until it takes scripts.
    pub fn boot(&self, cache: &Cache, options: Options<'_>) -> Result<Guest> {
        let (kernel, initramfs) = self.image(cache)?;
        let launch = Launch {
            name: options.name.to_string(),
            words: self.words.clone(),
            envs: Vec::new(),
            scripts: true,
            incoming: false,
            boot_limit: BOOT_LIMIT,
            limit: LIFE_LIMIT,
        };
        launch.boot(cache, |dir, console| {
            Ok(arguments(&options, &kernel, &initramfs, dir, console))
        })
    }

    /// The kernel and the initramfs.
    fn image(&self, cache: &Cache) -> Result<(PathBuf, PathBuf)> {
        let recipe = format!("{MODULES:?}{DIRECTORIES:?}{LIBRARIES:?}{PERL_MODULES:?}");
        let (first, init) = (FIRST, INIT);
        let key = cache::key(&[RECIPE, &self.guest.id(), first, init, ICARSA, &recipe]);
        let dir = cache.artefact("s390x-image", &key, |part| {
            say("image: initramfs for s390x");
            fs::write(part.join("initramfs.cpio"), self.initramfs()?)?;
            Ok(())
        })?;
        cache.prune("s390x-image", &dir)?;
        let release = kernel::release(&self.guest)?;
        let kernel = self.guest.root().join(format!("boot/vmlinuz-{release}"));
        Ok((kernel, dir.join("initramfs.cpio")))
    }

    fn initramfs(&self) -> Result<Vec<u8>> {
        let root = self.guest.root();
        let read = |path: &Path| fs::read(path).with_context(|| format!("{}", path.display()));
        let mut archive = Archive::new();
        for dir in DIRECTORIES {
            archive.directory(dir);
        }
        archive.character_device("dev/console", 5, 1);
        archive.character_device("dev/null", 1, 3);
        for program in ["busybox", "perl"] {
            let bytes = read(&self.guest.program(program)?)?;
            archive.file(&format!("bin/{program}"), 0o755, &bytes);
        }
        for library in LIBRARIES {
            let bytes = read(&placed(root, &format!("{LIBRARY_DIR}/{library}")))?;
            archive.file(&format!("lib/{library}"), 0o755, &bytes);
        }
        for module in PERL_MODULES {
            let bytes = read(&root.join(PERL).join(module))?;
            archive.file(&format!("{PERL}/{module}"), 0o644, &bytes);
        }
        let release = kernel::release(&self.guest)?;
        archive.directory(&format!("boot/{release}"));
        let drivers = format!("lib/modules/{release}/kernel/drivers");
        for (i, module) in MODULES.iter().enumerate() {
            // Compressed since trixie.
            let files = ["ko", "ko.xz"]
                .map(|end| (placed(root, &format!("{drivers}/{module}.{end}")), end));
            let Some((file, end)) = files.iter().find(|(file, _)| file.exists()) else {
                continue;
            };
            let name = module.rsplit('/').next().unwrap_or(module);
            let name = format!("boot/{release}/{i:02}-{name}.{end}");
            archive.file(&name, 0o644, &read(file)?);
        }
        archive.file("bin/icarsa", 0o755, ICARSA.as_bytes());
        archive.file("init.sh", 0o755, INIT.as_bytes());
        archive.file("init", 0o755, FIRST.as_bytes());
        Ok(archive.finish())
    }
}

/// A file below `usr`, or below the root where a release keeps both apart (bookworm).
fn placed(root: &Path, path: &str) -> PathBuf {
    let merged = root.join("usr").join(path);
    if merged.exists() {
        merged
    } else {
        root.join(path)
    }
}

/// The first set of packages that is complete on a mirror, those in the cache first.
fn first_complete<T>(
    cache: &Cache,
    wishes: &[PackageSet],
    fetch: impl Fn(&PackageSet) -> Result<T>,
) -> Result<T> {
    let cached = wishes
        .iter()
        .find(|wish| Tree::cached(cache, wish).is_some());
    let mut failures = String::new();
    for wish in cached.into_iter().chain(wishes) {
        match fetch(wish) {
            Ok(found) => return Ok(found),
            Err(e) => failures.push_str(&format!("\n{}: {e:#}", wish.suites.join("+"))),
        }
    }
    bail!("no suite has them:{failures}")
}

fn from_debian(cache: &Cache, wish: &PackageSet) -> Result<(Tree, Vec<OsString>, String)> {
    let host = Tree::fetch(cache, wish, |packages| {
        let qemu = packages.iter().find(|p| p.name == "qemu-system-s390x");
        let version = qemu.map_or("", |p| p.version.as_str());
        if parse_version(version) < Some(NEEDED) {
            bail!("has QEMU {version:?}, which is too old");
        }
        Ok(())
    })?;
    let words = host.tool_words(&host.program("qemu-system-s390x")?)?;
    let mut words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
    words.push("-L".into());
    words.push(host.root().join("usr/share/qemu").into());
    let (program, options) = words.split_first().context("an empty command")?;
    let out = Command::new(program)
        .args(options)
        .arg("--version")
        .output()?;
    if !out.status.success() {
        bail!("it does not run: {}", String::from_utf8_lossy(&out.stderr));
    }
    let version = String::from_utf8_lossy(&out.stdout);
    let version = version.lines().next().unwrap_or_default().to_string();
    Ok((host, words, version))
}

const FIRST: &str = include_str!("../assets/s390x.sh");
const INIT: &str = include_str!("../assets/init.sh");
const ICARSA: &str = include_str!("../assets/icarsa.pl");

/// QEMU's command line.
fn arguments(
    options: &Options<'_>,
    kernel: &Path,
    initramfs: &Path,
    dir: &Path,
    console: &Path,
) -> Vec<OsString> {
    let mut args: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
    add(&["-nodefaults", "-no-user-config", "-display", "none"]);
    // Translations of the first kernel would slow down each store of the next one's decompression:
    // a reboot took more than a minute of a processor. A cache of this size is emptied before.
    add(&["-accel", "tcg,thread=multi,tb-size=32", "-cpu", "max"]);
    add(&["-M", "s390-ccw-virtio", "-m", "512M"]);
    add(&["-smp", &options.cpus.to_string()]);
    // A guest that reboots by itself has panicked.
    add(&["-action", "reboot=shutdown"]);
    crate::machine::channels(&mut add, dir, console, Some("virtio-serial-ccw"));
    add(&["-kernel", &kernel.display().to_string()]);
    add(&["-initrd", &initramfs.display().to_string()]);
    // The console shows how far a boot or a reboot that fails has come.
    add(&["-append", "console=ttyS0 panic=-1 audit=0 apparmor=0"]);
    let mut plugin = options.plugin.display().to_string();
    for argument in options.arguments.split(',').filter(|a| !a.is_empty()) {
        plugin.push(',');
        plugin.push_str(argument);
    }
    add(&["-plugin", &plugin]);
    args
}
