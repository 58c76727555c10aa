-- Scripts: compiled once for all servers, with the global names of Redis alone.
local parts, sha1 = ...

local cjson, command, commands, fail = parts.cjson, parts.command, parts.commands, parts.fail
local fail_unsupported, format_number = parts.fail_unsupported, parts.format_number
local parse_integer = parts.parse_integer
local lower, select, type, upper = string.lower, select, type, string.upper

local OOM = "OOM command not allowed when used memory > 'maxmemory'."
local MISCONF = 'MISCONF Errors writing to the AOF file: No space left on device'

local running -- keyspace of the running script, or nil

-- Fails if a full server rejects the command. A script that has already written may continue.
local function check_capacity(space, found)
  if running and space.dirty then return end
  if space.full == 'OOM' then
    if found.grows then fail(OOM) end
  elseif found.writes or found == commands.PING then
    fail(MISCONF)
  end
end

-- Executes one command and returns its reply in the form for scripts; fails with Redis' error.
function parts.perform(space, args, n)
  local found = commands[args[1]] or commands[upper(args[1])]
  if not found then fail_unsupported(args[1]) end
  local arity = found.arity
  if arity >= 0 and n ~= arity or n < -arity then
    fail(running and 'ERR Wrong number of args calling Redis command from script' or
      "ERR wrong number of arguments for '" .. lower(args[1]) .. "' command")
  end
  if space.full ~= '' then check_capacity(space, found) end
  if running then
    if found.outside then fail_unsupported(args[1] .. ' in a script') end
    space.dirty = space.dirty or found.writes
  end
  return found.run(space, args, n)
end
local perform = parts.perform

local function call(...)
  local args, n = {...}, select('#', ...)
  if n == 0 then fail('ERR Please specify at least one argument for this redis.call() call') end
  for i = 1, n do
    local kind = type(args[i])
    if kind == 'number' then
      args[i] = format_number(args[i])
    elseif kind ~= 'string' then
      fail('ERR Lua redis lib command arguments must be strings or integers')
    end
  end
  return perform(running, args, n)
end

local function protected_call(...)
  local done, reply = pcall(call, ...)
  if done then return reply end
  if type(reply) == 'table' and reply.err then return {err = reply.err} end
  error(reply, 0)
end

local function error_reply(...)
  local message = ...
  if select('#', ...) ~= 1 or type(message) ~= 'string' then
    return {err = 'ERR wrong number or type of arguments'}
  end
  local code = string.match(message, '^%-(.+ .*)')
  return {err = code or 'ERR ' .. string.gsub(message, '^%-', '')}
end

local function status_reply(...)
  local message = ...
  if select('#', ...) ~= 1 or type(message) ~= 'string' then
    return {err = 'ERR wrong number or type of arguments'}
  end
  return {ok = message}
end

local function copy(library, without)
  local found = {}
  for name, item in pairs(library) do found[name] = item end
  for _, name in ipairs(without) do found[name] = nil end
  return found
end

local names = {
  assert = assert, error = error, ipairs = ipairs, next = next, pairs = pairs, pcall = pcall,
  rawequal = rawequal, rawget = rawget, select = select, tonumber = tonumber,
  tostring = tostring, type = type, unpack = unpack, xpcall = xpcall,
  string = copy(string, {'dump'}), table = copy(table, {}),
  math = copy(math, {'random', 'randomseed'}), cjson = cjson,
  redis = setmetatable({call = call, pcall = protected_call, error_reply = error_reply,
    status_reply = status_reply},
    {__index = function(_, name) fail_unsupported('redis.' .. name) end}),
}

setmetatable(names, {
  __index = function(_, name)
    error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
  end,
  __newindex = function() error('Attempt to modify a readonly table', 2) end,
})

local compiled = {} -- sha1 -> function

local function register(space, source)
  local sha = sha1(source)
  if not compiled[sha] then
    local chunk, complaint = loadstring(source, '@user_script')
    if not chunk then fail('ERR Error compiling script (new function): ' .. complaint) end
    compiled[sha] = setfenv(chunk, names)
  end
  space.scripts[sha] = true
  return sha
end

-- args: command, script, number of keys, keys, arguments.
local function run(space, sha, args, n)
  local count = parse_integer(args[3])
  if count > n - 3 then fail("ERR Number of keys can't be greater than number of args") end
  if count < 0 then fail("ERR Number of keys can't be negative") end
  local keys, argv = {}, {}
  for i = 1, count do keys[i] = args[3 + i] end
  for i = 4 + count, n do argv[i - 3 - count] = args[i] end
  rawset(names, 'KEYS', keys)
  rawset(names, 'ARGV', argv)
  running, space.dirty, space.script = space, false, sha
  return compiled[sha]()
end

command('EVAL', -3, 'o', function(space, args, n)
  return run(space, register(space, args[2]), args, n)
end)

command('EVALSHA', -3, 'o', function(space, args, n)
  local sha = args[2]
  if not space.scripts[sha] then
    fail('NOSCRIPT No matching script. Please use EVAL.')
  end
  return run(space, sha, args, n)
end)

command('SCRIPT', -2, 'o', function(space, args, n)
  local what = upper(args[2])
  if what == 'LOAD' and n == 3 then return register(space, args[3]) end
  if what ~= 'FLUSH' or n ~= 2 then fail_unsupported('SCRIPT ' .. args[2]) end
  space.scripts = {}
  return {ok = 'OK'}
end)

-- Resets the state after a command; returns the sha1 of the script that ran, if any.
function parts.end_command(space)
  local script = running and space.script
  running = nil
  return script
end
