//! Installed files: by packaging/install.sh into a directory of any name, and as a Debian package
//! in a tree with nothing else in it. Forms of packages, for both architectures.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../packaging")
}

/// Runs a script of packaging/; it must succeed.
fn script(name: &str, variables: &[(&str, &Path)], args: &[&Path]) -> String {
    let mut command = Command::new(packaging().join(name));
    command.env_remove("DESTDIR").env_remove("PREFIX");
    let output = command
        .envs(variables.iter().copied())
        .args(args)
        .output()
        .unwrap();
    done(&output)
}

/// Returns the output of a command that has to succeed.
fn done(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let error = text(&output.stderr);
    assert!(output.status.success(), "{}{error}", text(&output.stdout));
    text(&output.stdout)
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_vnvme"))
}

/// All files below a directory.
fn files(root: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path())
            } else {
                found.insert(entry.path().strip_prefix(root).unwrap().to_owned());
            }
        }
    }
    found
}

fn has(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output();
    if let Err(error) = &found {
        testkit::skip("vnvme: package", format!("{tool}: {error}"));
    }
    found.is_ok()
}

#[test]
fn uninstall_keeps_configuration_only() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("a tree with spaces");
    let at = [("DESTDIR", &*root)];
    let install = || script("install.sh", &at, &[Path::new("install"), program()]);
    let uninstall = || script("install.sh", &at, &[Path::new("uninstall"), program()]);
    install();
    let first = files(&root);
    for path in [
        "usr/local/bin/vnvme",
        "usr/local/share/man/man1/vnvme-serve.1",
        "usr/local/share/man/man5/vnvme.toml.5",
        "usr/local/lib/systemd/system/vnvme@.service",
        "usr/local/share/bash-completion/completions/vnvme",
        "etc/apparmor.d/abstractions/libvirt-qemu.d/vnvme",
    ] {
        assert!(first.contains(Path::new(path)), "{path}: {first:#?}");
    }
    let unit = root.join("usr/local/lib/systemd/system/vnvme.service");
    let unit = fs::read_to_string(unit).unwrap();
    assert!(
        unit.contains("ExecStart=/usr/local/bin/vnvme daemon"),
        "{unit}"
    );

    // A second installation over the first, and over files that the administrator has changed.
    let profile = root.join("etc/apparmor.d/abstractions/libvirt-qemu.d/vnvme");
    fs::write(&profile, "changed\n").unwrap();
    fs::write(root.join("etc/vnvme/vm0.toml"), "mine\n").unwrap();
    install();
    assert_eq!(fs::read_to_string(&profile).unwrap(), "changed\n");
    let told = uninstall();
    assert!(told.contains("etc/vnvme"), "{told}");
    let left = files(&root);
    let wanted = [
        "etc/apparmor.d/abstractions/libvirt-qemu.d/vnvme",
        "etc/vnvme/vm0.toml",
    ];
    assert_eq!(left, wanted.iter().map(PathBuf::from).collect());
    assert!(!root.join("usr/local/share/doc/vnvme").exists());
    // With nothing there it is no error.
    uninstall();
}

#[test]
fn missing_program_is_not_installed() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(packaging().join("install.sh"))
        .env("DESTDIR", directory.path())
        .args(["install", "/none/vnvme"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is no program"));
    assert!(files(directory.path()).is_empty());
}

#[test]
fn man_pages_have_no_warnings() {
    if !has("man") {
        return;
    }
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/man");
    let mut count = 0;
    for page in fs::read_dir(pages).unwrap() {
        let path = page.unwrap().path();
        let output = Command::new("man")
            .args(["--warnings", "--encoding=UTF-8", "--local-file"])
            .arg(&path)
            .env("MANROFFSEQ", "")
            .env("MANWIDTH", "80")
            .env("LC_ALL", "C.UTF-8")
            .output()
            .unwrap();
        done(&output);
        // A command line of an example is longer than a line: lintian has nothing against that.
        let complaints = String::from_utf8_lossy(&output.stderr);
        let complaints: Vec<&str> = complaints
            .lines()
            .filter(|line| !(line.contains("adjust line") || line.contains("break line")))
            .filter(|line| !line.is_empty())
            .collect();
        assert!(complaints.is_empty(), "{}: {complaints:?}", path.display());
        assert!(!output.stdout.is_empty(), "{}", path.display());
        count += 1;
    }
    assert!(count > 10);
}

/// The hook of libvirt starts and stops the unit of a domain that has a file, and of no other.
#[test]
fn libvirt_hook_serves_domains_with_file_only() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let log = root.join("log");
    let systemctl = root.join("systemctl");
    fs::write(
        &systemctl,
        format!(
            "#!/bin/sh\necho \"$@\" >> '{}'\nexit ${{FAILS:-0}}\n",
            log.display()
        ),
    )
    .unwrap();
    fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(root.join("vm0.toml"), "").unwrap();
    let path = format!("{}:/usr/bin:/bin", root.display());
    let hook = |fails: &str, args: &[&str]| {
        let output = Command::new(packaging().join("libvirt/qemu"))
            .args(args)
            .env("PATH", &path)
            .env("FAILS", fails)
            .env("VNVME_CONFIG_DIR", root)
            .output()
            .unwrap();
        let told = fs::read_to_string(&log).unwrap_or_default();
        let _ = fs::remove_file(&log);
        (
            output.status.code(),
            told,
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    for (args, wanted) in [
        (
            ["vm0", "prepare", "begin", "-"],
            "start vnvme@vm0.service\n",
        ),
        (["vm0", "release", "end", "-"], "stop vnvme@vm0.service\n"),
        (["vm0", "started", "begin", "-"], ""),
        (["vm0", "migrate", "begin", "-"], ""),
        (["vm1", "prepare", "begin", "-"], ""),
        (["../vm0", "prepare", "begin", "-"], ""),
        ([".vm0", "prepare", "begin", "-"], ""),
        (["vm0;x", "prepare", "begin", "-"], ""),
        (["", "prepare", "begin", "-"], ""),
    ] {
        let (status, told, _) = hook("0", &args);
        assert_eq!((status, &*told), (Some(0), wanted), "{args:?}");
    }
    let (status, _, error) = hook("1", &["vm0", "prepare", "begin", "-"]);
    assert_eq!(status, Some(1), "the domain does not start");
    assert!(error.contains("journalctl -u vnvme@vm0.service"), "{error}");
}

/// A tree with a shell, dpkg and the parts of the C library that the program needs, from this
/// machine. The package is installed in it as dpkg does that anywhere.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            testkit::skip("vnvme: package in a tree", "it is not root");
            return None;
        }
        if !(has("dpkg") && has("dpkg-deb")) {
            return None;
        }
        let tree = Self(tempfile::tempdir().unwrap());
        for directory in [
            "usr/bin",
            "usr/sbin",
            "usr/lib",
            "usr/lib64",
            "etc",
            "tmp",
            "run",
            "var/lib/dpkg/info",
            "var/lib/dpkg/updates",
        ] {
            fs::create_dir_all(tree.path(directory)).unwrap();
        }
        for name in ["bin", "sbin", "lib", "lib64"] {
            symlink(format!("usr/{name}"), tree.path(name)).unwrap();
        }
        fs::write(tree.path("var/lib/dpkg/status"), "").unwrap();
        for tool in ["sh", "rm", "rmdir"] {
            tree.bring(tool);
        }
        tree.bring_libraries(program());
        Some(tree)
    }

    fn path(&self, below: &str) -> PathBuf {
        self.0.path().join(below.trim_start_matches('/'))
    }

    /// Copies a program and its libraries.
    fn bring(&self, tool: &str) {
        let found = Path::new("/usr/bin").join(tool);
        fs::copy(&found, self.path("usr/bin").join(tool)).unwrap();
        self.bring_libraries(&found);
    }

    fn bring_libraries(&self, program: &Path) {
        let listed = done(&Command::new("ldd").arg(program).output().unwrap());
        for word in listed
            .split_whitespace()
            .filter(|word| word.starts_with('/'))
        {
            let to = self.path(word);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(word, to).unwrap();
        }
    }

    fn dpkg(&self, args: &[&str]) -> String {
        let output = Command::new("dpkg")
            .arg("--root")
            .arg(self.0.path())
            .args(["--force-depends"])
            .args(args)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .output()
            .unwrap();
        done(&output)
    }
}

/// Relative links of installed documents lead to installed files, except documents for developers.
fn links_lead_to_files(documents: &Path) {
    for page in fs::read_dir(documents).unwrap() {
        let page = page.unwrap().path();
        let text = fs::read_to_string(&page).unwrap();
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            let target = link.split('#').next().unwrap();
            let for_developers = [
                "../ARCHITECTURE.md",
                "../CONTRIBUTING.md",
                "internals/",
                "man",
            ];
            if target.contains("://")
                || target.contains(' ')
                || for_developers
                    .iter()
                    .any(|left_out| target.starts_with(left_out))
            {
                continue;
            }
            assert!(
                documents.join(target).exists(),
                "{}: {link}",
                page.display()
            );
        }
    }
}

#[test]
fn package_is_installed_used_and_removed() {
    let Some(tree) = Tree::new() else {
        return;
    };
    let output = tempfile::tempdir().unwrap();
    let made = script("deb.sh", &[], &[program(), output.path()]);
    let package = made.trim();
    let before = files(tree.0.path());

    tree.dpkg(&["--install", package]);
    let installed = tree.dpkg(&["--listfiles", "vnvme"]);
    for path in [
        "/usr/bin/vnvme",
        "/usr/lib/systemd/system/vnvme.service",
        "/usr/share/man/man1/vnvme.1.gz",
        "/usr/share/doc/vnvme/copyright",
        "/usr/share/doc/vnvme/docs/openapi.json",
        "/usr/share/doc/vnvme/packaging/grafana/vnvme.json",
        "/etc/vnvme",
    ] {
        assert!(
            installed.lines().any(|line| line == path),
            "{path}: {installed}"
        );
        assert!(tree.path(path).exists(), "{path}");
    }
    // The program runs with only the package and the C library.
    let version = Command::new("chroot")
        .arg(tree.0.path())
        .args(["/usr/bin/vnvme", "--version"])
        .output()
        .unwrap();
    assert!(done(&version).starts_with("vnvme "), "{version:?}");
    // The unit names the program's path.
    if has("systemd-analyze") {
        for (unit, command) in [("vnvme.service", "daemon"), ("vnvme@.service", "serve")] {
            let path = format!("usr/lib/systemd/system/{unit}");
            let text = fs::read_to_string(tree.path(&path)).unwrap();
            let start = format!("ExecStart=/usr/bin/vnvme {command} ");
            assert!(text.contains(&start), "{text}");
        }
    }
    links_lead_to_files(&tree.path("usr/share/doc/vnvme/docs"));
    // Units that an administrator has enabled.
    let wants = tree.path("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants).unwrap();
    for unit in ["vnvme.service", "vnvme@vm0.service"] {
        symlink("/usr/lib/systemd/system/vnvme.service", wants.join(unit)).unwrap();
    }
    // Once more over itself, as an upgrade does.
    tree.dpkg(&["--install", package]);
    fs::write(tree.path("etc/vnvme/vnvme.toml"), "# mine\n").unwrap();

    tree.dpkg(&["--remove", "vnvme"]);
    for unit in ["vnvme.service", "vnvme@vm0.service"] {
        assert!(
            wants.join(unit).symlink_metadata().is_err(),
            "{unit} is still enabled"
        );
    }
    fs::remove_dir(&wants).unwrap();
    let of_dpkg = |path: &PathBuf| path.starts_with("var/lib/dpkg") || path.starts_with("var/log");
    let left: Vec<PathBuf> = files(tree.0.path())
        .difference(&before)
        .filter(|path| !of_dpkg(path))
        .cloned()
        .collect();
    let wanted = [
        "etc/apparmor.d/abstractions/libvirt-qemu.d/vnvme",
        "etc/vnvme/vnvme.toml",
    ];
    assert_eq!(
        left,
        wanted.map(PathBuf::from),
        "only configuration is left"
    );

    tree.dpkg(&["--purge", "vnvme"]);
    let left: Vec<PathBuf> = files(tree.0.path())
        .difference(&before)
        .filter(|path| !of_dpkg(path))
        .cloned()
        .collect();
    assert_eq!(left, [] as [PathBuf; 0]);
}

/// ELF header of a program for AArch64 (e_machine 183), and what packages read of one.
fn program_for_aarch64() -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[16..20].copy_from_slice(&[3, 0, 183, 0]);
    bytes.extend_from_slice(b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.17\0");
    bytes
}

/// Two checkouts make the same packages, byte for byte, also for another machine.
#[test]
fn packages_from_two_folders_are_equal() {
    let directory = tempfile::tempdir().unwrap();
    let root = packaging().join("..").canonicalize().unwrap();
    let other = directory.path().join("other checkout");
    symlink(&root, &other).unwrap();
    let inventory = directory.path().join("inventory");
    fs::create_dir(&inventory).unwrap();
    for name in ["sbom.cdx.json", "LICENSES-dependencies.txt"] {
        fs::write(inventory.join(name), "{}\n").unwrap();
    }
    let foreign = directory.path().join("vnvme");
    fs::write(&foreign, program_for_aarch64()).unwrap();
    fs::set_permissions(&foreign, fs::Permissions::from_mode(0o755)).unwrap();
    let own = if cfg!(target_arch = "x86_64") {
        ["amd64.deb", "x86_64.rpm", "x86_64-linux.tar.gz"]
    } else {
        ["arm64.deb", "aarch64.rpm", "aarch64-linux.tar.gz"]
    };
    let arm = ["arm64.deb", "aarch64.rpm", "aarch64-linux.tar.gz"];
    for (program, endings) in [(Path::new("/bin/true"), own), (&*foreign, arm)] {
        for ((script, tool), ending) in [
            ("deb.sh", "dpkg-deb"),
            ("rpm.sh", "rpmbuild"),
            ("tarball.sh", "tar"),
        ]
        .iter()
        .zip(endings)
        {
            if !has(tool) {
                continue;
            }
            let made = [&root, &other].map(|checkout| {
                let output = directory.path().join("packages");
                let made = Command::new(checkout.join("packaging").join(script))
                    .env("INVENTORY", &inventory)
                    .env("SOURCE_DATE_EPOCH", "1767225600")
                    .args([program, &output])
                    .output()
                    .unwrap();
                let path = done(&made).trim().to_owned();
                assert!(path.ends_with(ending), "{path}");
                let bytes = fs::read(&path).unwrap();
                fs::remove_file(&path).unwrap();
                bytes
            });
            assert!(made[0] == made[1], "{script}, {ending}: they differ");
        }
    }
}

/// Files and scripts of the RPM package, by this machine's rpm in a tree without a service manager.
#[test]
fn rpm_is_installed_replaced_and_erased() {
    let Some(tree) = Tree::new() else {
        return;
    };
    if !(has("rpm") && has("rpmbuild")) {
        return;
    }
    let output = tempfile::tempdir().unwrap();
    // Another program keeps the package small.
    let made = script("rpm.sh", &[], &[Path::new("/bin/true"), output.path()]);
    let package = made.trim();
    tree.bring_libraries(Path::new("/bin/true"));
    let before = files(tree.0.path());
    let rpm = |args: &[&str]| {
        let output = Command::new("rpm")
            .arg("--root")
            .arg(tree.0.path())
            .args(["--dbpath", "/var/lib/rpm"])
            .args(args)
            .output()
            .unwrap();
        done(&output)
    };
    // The tree has no packages that it could depend on.
    rpm(&["--install", "--nodeps", package]);
    let listed = rpm(&["--query", "--list", "vnvme"]);
    for path in [
        "/usr/bin/vnvme",
        "/usr/lib/systemd/system/vnvme.service",
        "/usr/share/man/man1/vnvme.1.gz",
        "/usr/share/licenses/vnvme/LICENSE-MIT",
        "/etc/vnvme",
    ] {
        assert!(listed.lines().any(|line| line == path), "{path}: {listed}");
        assert!(tree.path(path).exists(), "{path}");
    }
    let runs = Command::new("chroot")
        .arg(tree.0.path())
        .arg("/usr/bin/vnvme")
        .output()
        .unwrap();
    done(&runs);
    let wants = tree.path("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants).unwrap();
    let enabled = wants.join("vnvme.service");
    symlink("/usr/lib/systemd/system/vnvme.service", &enabled).unwrap();
    // As an upgrade does.
    rpm(&["--upgrade", "--force", "--nodeps", package]);
    assert!(enabled.symlink_metadata().is_ok(), "no longer enabled");
    fs::write(tree.path("etc/vnvme/vnvme.toml"), "# mine\n").unwrap();

    rpm(&["--erase", "vnvme"]);
    assert!(enabled.symlink_metadata().is_err(), "still enabled");
    let left: Vec<PathBuf> = files(tree.0.path())
        .difference(&before)
        .filter(|path| !path.starts_with("var/lib/rpm"))
        .cloned()
        .collect();
    assert_eq!(left, [PathBuf::from("etc/vnvme/vnvme.toml")]);
}

/// A tarball has all that its install.sh installs.
#[test]
fn tarball_installs_what_a_checkout_does() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let program = Path::new("/bin/true");
    let made = script("tarball.sh", &[], &[program, root]);
    let unpacked = Command::new("tar")
        .args(["--extract", "--file", made.trim(), "--directory"])
        .arg(root)
        .output()
        .unwrap();
    done(&unpacked);
    let name = Path::new(made.trim()).file_name().unwrap();
    let top = root.join(name.to_str().unwrap().strip_suffix(".tar.gz").unwrap());
    let installed = Command::new(top.join("packaging/install.sh"))
        .arg("install")
        .arg(top.join("vnvme"))
        .env_remove("PREFIX")
        .env("DESTDIR", root.join("tarball"))
        .output()
        .unwrap();
    done(&installed);
    let checkout = root.join("checkout");
    let install = Path::new("install");
    script("install.sh", &[("DESTDIR", &checkout)], &[install, program]);
    assert_eq!(files(&root.join("tarball")), files(&checkout));
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "README.md"] {
        assert!(top.join(name).exists(), "{name}");
    }
}
