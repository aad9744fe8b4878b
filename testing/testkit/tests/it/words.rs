//! `testing/harness/words.sh` without files: openings of comments, filler words and subjects of
//! commits.

use std::fs;
use std::path::Path;
use std::process::Command;

const LIMITS: &str = "word what 1.5\nword others 0.5\npages all 3\npages each 5\n";

/// A tree with the scripts, a crate and a page, as a repository with one commit.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(subject: &str) -> Tree {
        let tree = Tree(tempfile::tempdir().unwrap());
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testing/harness");
        for folder in ["testing/harness", "docs", "crates/data/queue/src"] {
            fs::create_dir_all(tree.0.path().join(folder)).unwrap();
        }
        for script in ["words.sh", "prose.awk"] {
            fs::copy(
                scripts.join(script),
                tree.0.path().join("testing/harness").join(script),
            )
            .unwrap();
        }
        tree.write("testing/harness/prose.limits", LIMITS);
        tree.write("README.md", "A page.\n");
        tree.write(
            "crates/data/queue/src/lib.rs",
            "/// Returns the tail.\nfn a() {}\n",
        );
        tree.git(&["init", "--quiet"]);
        tree.git(&["add", "."]);
        tree.commit(subject);
        tree
    }

    fn write(&self, path: &str, text: &str) {
        fs::write(self.0.path().join(path), text).unwrap();
    }

    fn git(&self, args: &[&str]) {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=test", "-c", "user.email=test@example.org"]);
        let output = git.args(args).current_dir(self.0.path()).output().unwrap();
        assert!(output.status.success(), "git {args:?}: {output:?}");
    }

    fn commit(&self, subject: &str) {
        self.git(&["commit", "--quiet", "--allow-empty", "-m", subject]);
    }

    /// Runs the gate; returns whether it passes, and its output.
    fn check(&self) -> (bool, String) {
        let script = self.0.path().join("testing/harness/words.sh");
        let output = Command::new(script).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.success(), text)
    }

    #[track_caller]
    fn fails_with(&self, words: &str) {
        let (passes, text) = self.check();
        assert!(!passes && text.contains(words), "{words:?} in: {text}");
    }

    #[track_caller]
    fn passes(&self) {
        let (passes, text) = self.check();
        assert!(passes && text.is_empty(), "{text}");
    }
}

#[test]
fn comment_that_opens_with_a_pronoun_fails() {
    let tree = Tree::new("queue: add the first function");
    tree.passes();
    let two = "/// Returns the tail.\nfn a() {}\n\n/// It has ended.\nfn b() {}\n";
    tree.write("crates/data/queue/src/lib.rs", two);
    tree.fails_with("crates/data/queue/src/lib.rs:4: It has ended.");
    // Only the first line of a block counts, and no test's.
    let later = "/// Returns the tail.\n/// It has ended.\nfn a() {}\n";
    tree.write("crates/data/queue/src/lib.rs", later);
    fs::create_dir_all(tree.0.path().join("crates/data/queue/tests")).unwrap();
    tree.write("crates/data/queue/tests/it.rs", "// It has ended.\n");
    tree.passes();
}

#[test]
fn limit_above_the_share_fails() {
    let tree = Tree::new("queue: add the first function");
    tree.write(
        "testing/harness/prose.limits",
        &format!("opening crates/data/queue 1\n{LIMITS}"),
    );
    tree.fails_with(
        "crates/data/queue: 0.00% of its comments open with a pronoun: lower its limit",
    );
    tree.write(
        "testing/harness/prose.limits",
        &format!("opening crates/data/queue 2.5\n{LIMITS}"),
    );
    tree.fails_with("crates/data/queue: a ceiling is at most 2%");
    tree.write(
        "testing/harness/prose.limits",
        &format!("opening crates/data/none 1\n{LIMITS}"),
    );
    tree.fails_with("there is no crate crates/data/none");
}

#[test]
fn filler_words_fail_in_comments_and_pages() {
    let tree = Tree::new("queue: add the first function");
    tree.write(
        "crates/data/queue/src/lib.rs",
        "/// Returns what was read.\nfn a() {}\n",
    );
    tree.fails_with("\"what\": 250.00 per 1,000 words of comments");
    tree.write(
        "crates/data/queue/src/lib.rs",
        "/// Returns the data.\nfn a() {}\n",
    );
    let page = "What a page says, what it has.\n```\nwhat code has\n```\n";
    tree.write("README.md", page);
    tree.fails_with("pages: \"what\": 285.7 per 1,000 words");
}

#[test]
fn subject_that_names_no_change_fails() {
    let tree = Tree::new("queue: add the first function");
    for subject in ["queue: words", "add the first function", "queue: two words"] {
        tree.commit(subject);
        tree.fails_with(subject);
    }
    // Without origin/main only the last commit counts.
    tree.commit("queue: return the tail");
    tree.passes();
    tree.commit("queue: words");
    tree.git(&["update-ref", "refs/remotes/origin/main", "HEAD"]);
    tree.commit("queue, README: return the tail");
    tree.passes();
    tree.git(&["update-ref", "refs/remotes/origin/main", "HEAD~2"]);
    tree.fails_with("queue: words");
}
