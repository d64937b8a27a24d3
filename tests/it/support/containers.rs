//! Containers that are gone when the test process is, however that ends.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::LazyLock;

use testcontainers::core::{ContainerPort, IntoContainerPort as _};
use testcontainers::runners::AsyncRunner as _;
use testcontainers::{ContainerAsync, ContainerRequest, GenericImage, ImageExt as _};

use super::BACKGROUND;

/// Marks every container of these tests, for whoever cleans up a machine.
const LABEL: &str = "org.fencerow.test";
/// Marks those of this very process.
const RUN_LABEL: &str = "org.fencerow.run";

/// Waits for the end of this process, which closes its standard input even after SIGKILL, and then
/// removes the containers: nothing else would, since statics are not dropped.
const REAPER: &str = r#"
    trap '' INT TERM HUP
    read -r run
    cat >/dev/null
    ids=$(docker ps --all --quiet --filter "label=org.fencerow.run=$run")
    [ -z "$ids" ] || docker rm --force --volumes $ids
"#;

/// The name of this run, and the end of the pipe that only this process holds.
#[expect(clippy::zombie_processes, reason = "it ends after this process")]
static RUN: LazyLock<(String, ChildStdin)> = LazyLock::new(|| {
    let mut reaper = Command::new("sh")
        .args(["-c", REAPER])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // An interrupt from the terminal is not for the one who cleans up.
        .process_group(0)
        .spawn()
        .unwrap();
    let run = uuid::Uuid::new_v4().to_string();
    let mut stdin = reaper.stdin.take().unwrap();
    writeln!(stdin, "{run}").unwrap();
    (run, stdin)
});

/// A server in a container of its own.
pub(crate) struct Server {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Stops and starts it. Dropping it removes the container.
    pub(crate) container: ContainerAsync<GenericImage>,
}

/// Starts the image that `variable` names, or `default`. It may not answer yet.
pub(crate) async fn start(
    variable: &str,
    default: &str,
    port: u16,
    options: impl FnOnce(ContainerRequest<GenericImage>) -> ContainerRequest<GenericImage> + Send + 'static,
) -> Server {
    let image = std::env::var(variable).unwrap_or_else(|_| default.to_owned());
    let (name, tag) = match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name.to_owned(), tag.to_owned()),
        _ => (image.clone(), "latest".to_owned()),
    };
    let started = BACKGROUND.spawn(async move {
        let container_port: ContainerPort = port.tcp();
        let request = GenericImage::new(name, tag)
            .with_exposed_port(container_port)
            .with_label(LABEL, "1")
            .with_label(RUN_LABEL, RUN.0.as_str());
        let container = options(request).start().await?;
        let host = container.get_host().await?.to_string();
        let port = container.get_host_port_ipv4(container_port).await?;
        // `localhost` may mean ::1 first, where nothing is published.
        let host = if host == "localhost" { "127.0.0.1".to_owned() } else { host };
        Ok::<_, testcontainers::TestcontainersError>(Server { host, port, container })
    });
    match started.await.unwrap() {
        Ok(server) => server,
        Err(error) => panic!("cannot start {image} (set {variable} to name another image): {error}"),
    }
}

/// The server's address as other containers see it. On this machine it leads there as well, to the
/// port inside.
pub(crate) async fn inner_address(server: &Server) -> String {
    let format = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}";
    let mut inspect = tokio::process::Command::new("docker");
    inspect.args(["inspect", "--format", format, server.container.id()]);
    String::from_utf8(inspect.output().await.unwrap().stdout).unwrap().trim().to_owned()
}
